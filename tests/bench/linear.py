"""The linear kernel against MKL, the FMA peak and the read bandwidth, all measured in one run.

    python -m tests.bench.linear [--threads 2] [--isa avx2] [--rounds 9] [--json FILE]

Contestants take turns round by round, so that a slow moment hits all of them. Each turn begins with
a pause and one call that isn't timed: the OpenMP threads of the one before look for work for some
5 ms more, on a core that this one needs. Ratios are of medians over the rounds; "best" is the ratio
of the fastest rounds, which says more when other work shares the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from ops.kernels.cpu import load

# SmolLM2-135M: qkv, output, gate-up, down; 30 layers.
LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
LAYERS = 30


PAUSE_S = 0.03
BURN = 2_000_000  # rounds of sixteen FMAs: as long as the other contestants' turns


def take_turns(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, by name, each with the machine to itself and warm."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            time.sleep(PAUSE_S)
            call()
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def rates(seconds: list[float], amount: float) -> tuple[float, float]:
    """(at the median, at the best) amount per second."""
    return amount / statistics.median(seconds), amount / min(seconds)


def one_row(kernels, rounds: int) -> list[dict[str, object]]:
    """One row through the four weights of thirty layers, so that no cache holds them; GB/s against
    plain reads.
    """
    rows = []
    big = torch.ones(64 << 20)
    for dtype in (torch.bfloat16, torch.float32):
        work = [
            (torch.randn(1, k).to(dtype), kernels.pack_weight((torch.randn(n, k) * 0.03).to(dtype)))
            for _ in range(LAYERS)
            for n, k in LAYER
        ]
        size = sum(p.data.numel() * p.data.element_size() for _, p in work)

        def ours(work=work) -> None:
            for x, packed in work:
                kernels.linear(x, packed)

        took = take_turns({"ours": ours, "read": lambda: kernels.read_all(big)}, rounds)
        mine, limit = rates(took["ours"], size / 1e9), rates(took["read"], big.numel() * 4 / 1e9)
        rows.append(
            {
                "what": f"1 row, {str(dtype)[6:]}",
                "unit": "GB/s",
                "ours": mine,
                "read": limit,
                "of read": (mine[0] / limit[0], mine[1] / limit[1]),
            }
        )
    return rows


def many_rows(kernels, rounds: int) -> list[dict[str, object]]:
    """32 and 512 rows: GFLOP/s against MKL in fp32 and against nothing but FMAs."""
    rows = []
    for m in (32, 512):
        for n, k in LAYER:
            weight, x = torch.randn(n, k) * 0.03, torch.randn(m, k)
            packed = kernels.pack_weight(weight, inplace=False)
            half, xh = kernels.pack_weight(weight.bfloat16()), x.bfloat16()
            repeat = max(1, 2 * 10**9 // (2 * m * n * k))

            def times(call: Callable[[], object], repeat=repeat) -> Callable[[], None]:
                def run() -> None:
                    for _ in range(repeat):
                        call()

                return run

            took = take_turns(
                {
                    "ours": times(lambda x=x, packed=packed: kernels.linear(x, packed)),
                    "bf16": times(lambda xh=xh, half=half: kernels.linear(xh, half)),
                    "mkl": times(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight)),
                    "peak": lambda: kernels.burn_fma(BURN),
                },
                rounds,
            )
            work = 2e-9 * m * n * k * repeat
            rate = {name: rates(took[name], work) for name in ("ours", "bf16", "mkl")}
            peak = rates(took["peak"], BURN * 512e-9 * kernels.threads)
            rows.append(
                {
                    "what": f"{m} rows, [{n}, {k}]",
                    "unit": "GFLOP/s",
                    **rate,
                    "peak": peak,
                    "of mkl": tuple(a / b for a, b in zip(rate["ours"], rate["mkl"], strict=True)),
                    "bf16 of mkl": tuple(
                        a / b for a, b in zip(rate["bf16"], rate["mkl"], strict=True)
                    ),
                    "of peak": tuple(a / b for a, b in zip(rate["ours"], peak, strict=True)),
                }
            )
    return rows


def show(rows: list[dict[str, object]]) -> None:
    """One line per row: `name median (best)`."""
    for row in rows:
        cells = [
            f"{name} {value[0]:.2f} ({value[1]:.2f})"
            for name, value in row.items()
            if isinstance(value, tuple)
        ]
        print(f"{row['what']:<22} {row['unit']:<8} " + "   ".join(cells))


def main() -> None:
    """Prints the table; writes it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = load(args.isa)
    kernels.set_threads(args.threads)
    print(
        f"{kernels.name}, {args.threads} threads, {args.rounds} rounds; medians, best in brackets"
    )
    rows = one_row(kernels, args.rounds) + many_rows(kernels, args.rounds)
    show(rows)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"kernels": kernels.name, "threads": args.threads, "rows": rows}, file)


if __name__ == "__main__":
    main()
