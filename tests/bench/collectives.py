"""Gather against slices, and gloo's own all-reduce, on this machine's processes.

    python -m tests.bench.collectives [WORLD ...]

Prints medians in milliseconds per message size, ways interleaved. It chose
`ops.collectives.GATHER_LIMIT_BYTES`; both ways give the same bits, so only speed hangs on it.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import sys
import time
from typing import Any

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
ROUNDS = 15


def process(rank: int, world: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    from ops import collectives

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    via = collectives.link()

    def with_limit(limit: int) -> Any:
        def run(x: torch.Tensor) -> None:
            collectives.GATHER_LIMIT_BYTES = limit
            collectives.all_reduce(x, via)

        return run

    ways = {
        "gather": with_limit(1 << 60),
        "slices": with_limit(0),
        "gloo's own": lambda x: dist.all_reduce(x.clone()),
    }
    for size in SIZES:
        x = torch.randn(size // 2).bfloat16()
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                dist.barrier()
                began = time.perf_counter()
                way(x)
                taken[name].append((time.perf_counter() - began) * 1000)
        if rank == 0:
            medians = {name: statistics.median(times) for name, times in taken.items()}
            shown = "  ".join(f"{name} {value:8.3f} ms" for name, value in medians.items())
            print(f"{world} ranks {size >> 10:6d} KiB  {shown}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for world in [int(word) for word in sys.argv[1:]] or [2, 4]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [context.Process(target=process, args=(r, world, port)) for r in range(world)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
