"""How long the draw takes against vLLM's own sampler, on the same logits, in one run.

    OMP_NUM_THREADS=2 python -m tests.bench.draw [--rows 256] [--vocab 151936] [--repeat 5]
    python -m tests.bench.draw --device cuda --repeat 20

Prints, for each case, the median milliseconds of both and their ratio (below 1: ours is faster).
Both get float32 logits and return token ids; A and B take turns. "flat" logits are normal with
deviation 1, which leave tens of thousands of tokens in play and give no bound a hold; "peaked" ones
have deviation 4, nearer to a language model's. vLLM's sampler gets no seeds except in the case that
says so: seeds are the draw's default, and generators only slow vLLM down.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from ops import sampling

CASES: dict[str, dict[str, float]] = {
    "no filter": {},
    "no filter, seeded": {"seeded": 1},
    "top_k=50": {"k": 50},
    "top_p=0.9": {"p": 0.9},
    "top_k=50, top_p=0.9": {"k": 50, "p": 0.9},
    "min_p=0.1": {"m": 0.1},
    "greedy": {"t": 0.0},
}


def stock(rows: int, device: str, case: dict[str, float]) -> Callable[[torch.Tensor], torch.Tensor]:
    """vLLM's steps for one batch: temperature, min_p, top_k/top_p, draw. Changes the logits."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    temperature = torch.full((rows,), case.get("t", 1.0), device=device)
    k = (
        torch.full((rows,), int(case["k"]), dtype=torch.int32, device=device)
        if "k" in case
        else None
    )
    p = torch.full((rows,), case["p"], device=device) if "p" in case else None
    inner = TopKTopPSampler()
    generators = {}
    if "seeded" in case:
        generators = {i: torch.Generator(device).manual_seed(i) for i in range(rows)}

    def run(x: torch.Tensor) -> torch.Tensor:
        if not case.get("t", 1.0):
            return Sampler.greedy_sample(x)
        x = Sampler.apply_temperature(x, temperature, True)
        if "m" in case:
            prob = torch.softmax(x, dim=-1)
            x.masked_fill_(prob < prob.amax(dim=-1, keepdim=True) * case["m"], -torch.inf)
        kk = k.clone() if k is not None else None
        return inner(x, generators, kk, p)[0]

    return run


def ours(rows: int, case: dict[str, float]) -> Callable[[torch.Tensor], torch.Tensor]:
    """As in a step of the engine: the batch's options are ready, as vLLM's are, its positions are
    new."""
    columns = (case.get("t", 1.0), int(case.get("k", 0)), case.get("p", 1.0), case.get("m", 0.0))
    args = [[c] * rows for c in columns]
    opts = sampling.rows(*args, list(range(rows)), [0] * rows, [0] * rows)
    step = [0]

    def run(x: torch.Tensor) -> torch.Tensor:
        step[0] += 1
        return sampling.draw_with(x, opts.at(np.full(rows, step[0])))

    return run


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, logits: torch.Tensor, repeat: int) -> None:
    case = CASES[name]
    rows, device = logits.shape[0], logits.device.type
    forms = {"ours": ours(rows, case), "vllm": stock(rows, device, case)}
    times: dict[str, list[float]] = {"ours": [], "vllm": []}
    for turn in range(repeat + 1):
        for form, run in forms.items():
            x = logits.clone()
            settle(device)
            start = time.perf_counter()
            run(x)
            settle(device)
            if turn:  # the first turn warms up and compiles
                times[form].append((time.perf_counter() - start) * 1e3)
    a, b = (statistics.median(times[f]) for f in ("ours", "vllm"))
    print(f"{name:24} {a:9.1f} ms {b:9.1f} ms   {a / b:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    where = f"{torch.get_num_threads()} threads" if args.device == "cpu" else args.device
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # not installed everywhere
    print(f"{args.rows} x {args.vocab}, {where}, {sampling.SAMPLER}")
    for shape, deviation in (("flat", 1.0), ("peaked", 4.0)):
        g = torch.Generator().manual_seed(0)
        logits = torch.randn(args.rows, args.vocab, generator=g) * deviation
        logits = logits.to(args.device)
        print(f"\n{shape:24} {'ours':>9}    {'vLLM':>9}      ratio")
        for name in args.cases:
            slow = args.device == "cpu" and "top_p" in name  # vLLM sorts: seconds a turn
            measure(name, logits, min(args.repeat, 2) if slow else args.repeat)


if __name__ == "__main__":
    main()
