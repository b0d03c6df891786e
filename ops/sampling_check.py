"""The start's check of the draw: the device's form against the definition, alone, in batches and
at other places.
"""

from __future__ import annotations

import torch

from ops import sampling
from ops.registry import NotInvariant

# (temperature, top_k, top_p, min_p)
CASES = (
    (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1), (0.8, 50, 0.95, 0.02), (1e-3, 0, 1.0, 0.0), (5.0, 3, 0.5, 0.0),
)  # fmt: skip


def check(device: str | torch.device = "cpu", vocab: int = 1999) -> None:
    """Raises `NotInvariant` with the case and the row.

    Logits are made by the host, half of them rounded into ties.
    """
    host = torch.Generator().manual_seed(7)
    n = 4 * len(CASES)
    logits = torch.randn(n, vocab, generator=host) * 3
    logits[::2] = (logits[::2] * 2).round() / 2
    t, k, p, m = (list(c) for c in zip(*(CASES[i % len(CASES)] for i in range(n)), strict=True))
    seeds = [(-1) ** i * (i * 0x9E3779B97F4A7C15 % 2**63) for i in range(n)]
    choices, positions = [i % 3 for i in range(n)], [i * 37 for i in range(n)]
    args = (t, k, p, m, seeds, choices, positions)
    want = sampling.draw_rows(logits, sampling.rows(*args)).tolist()
    x = logits.to(device)
    _same("together", sampling.draw(x, *args).tolist(), want)
    back = [list(reversed(a)) for a in args]
    _same("reversed", sampling.draw(x.flip(0), *back).tolist()[::-1], want)
    alone = [int(sampling.draw(x[i : i + 1], *([a[i]] for a in args))) for i in range(n)]
    _same("alone", alone, want)


def _same(case: str, got: list[int], want: list[int]) -> None:
    for row, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            raise NotInvariant(
                f"vllm.Sampler: drawn {case}, row {row}: token {a} where the definition gives {b}"
            )
