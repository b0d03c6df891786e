"""The draw's filters in the form that compiles for Ascend: the definition's tokens, in Triton's
interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import numpy as np, torch
from ops import sampling
from ops.kernels.triton import draw_judge
from tests.ops.test_sampling import GOLDEN, _awkward, _golden_logits
draw_judge.BLOCK = 128
x = _golden_logits()
for options, want in GOLDEN[::2]:
    opts = sampling.rows(*[[o] * 3 for o in options])
    got = draw_judge.draw(x, opts, lanes=64, parts=2)
    assert got.tolist() == want, (options, got, want)
for seed, vocab in ((1, 300), (2, 1)):
    x, args = _awkward(7, vocab, seed)
    opts = sampling.rows(*args)
    got = draw_judge.draw(x, opts, lanes=64, parts=3)
    assert torch.equal(got, sampling.draw_rows(x, opts)), (seed, got)
x = torch.randn(12, 300, generator=torch.Generator().manual_seed(3))
x[::3] = (x[::3] * 2).round() / 2  # ties at the edge
p = np.array([1e-9, 0.02, 0.1, 0.5, 0.9, 1.0] * 2)
k = np.array([0] * 6 + [4, 30] * 3)
rest = [0.0, 1e-3] * 6, range(12), [1] * 12, [2**32 - 1] * 12
opts = sampling.rows([0.8] * 12, k, p, *rest)
want = sampling.draw_rows(x, opts)
assert torch.equal(draw_judge.draw(x, opts, lanes=64, parts=2), want)
free = sampling.rows([0.8] * 12, k, [1.0] * 12, *rest)
assert (sampling.draw_rows(x, free) != want).sum() > 3  # so many first winners lay outside
two = sampling.rows([2.0] * 12, [2] * 12, [1.0] * 12, *rest)
assert torch.equal(draw_judge.draw(x, two, lanes=64, parts=2), sampling.draw_rows(x, two))
"""
# One token too few, and a winner that is never asked again.
PLANTED = {
    "ties": "draw_judge.whole.table = short_k\n",
    "judge": "draw_judge._judge_kernel = never\n",
}
SETUP = """
from ops.kernels.triton import draw
made = draw.table
def short_k(opts, vocab):
    a = made(opts, vocab)
    a[:, 5] -= a[:, 5] > 1
    return a
class Never:
    def __getitem__(self, grid):
        return lambda x, n, s, b, out, kth, edge, left, *_, **__: left.zero_()
never = Never()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )


def test_interpreted() -> None:
    done = run(INTERPRETED)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(fault: str) -> None:
    first, rest = INTERPRETED.split("draw_judge.BLOCK = 128", 1)
    done = run(f"{first}{SETUP}{PLANTED[fault]}draw_judge.BLOCK = 128{rest}")
    assert "AssertionError" in done.stderr, done.stderr[-2000:]
