"""The Triton form: the definition's tokens in Triton's interpreter, and no contraction in its PTX.

The interpreter and the compiler each need a process of their own: Triton decides at import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import numpy as np
import torch
from ops import sampling
from ops.kernels.triton import draw, draw_filter
from tests.ops.test_sampling import GOLDEN, _awkward, _golden_logits
x = _golden_logits()
for options, want in GOLDEN[::2]:
    opts = sampling.rows(*[[o] * 3 for o in options])
    got = draw.draw(x, opts, lanes=64, programs=9)
    assert got.tolist() == want, (options, got, want)
draw_filter.LIST = 256  # ties longer than the list: the whole row is walked
for seed, vocab, split in ((1, 700, True), (1, 65, False), (2, 1, True), (3, 300, False)):
    x, args = _awkward(7, vocab, seed)
    opts = sampling.rows(*args)
    got = draw.draw(x, opts, lanes=64, programs=32, split=split)
    assert torch.equal(got, sampling.draw_rows(x, opts)), (seed, got)
    y = x.bfloat16()
    got = draw.draw(y, opts, lanes=64, programs=32, split=split)
    assert torch.equal(got, sampling.draw_rows(y.float(), opts)), (seed, got)

# Filters that are judged by their winner: a small top_p throws most winners out, some many times.
draw.SMALL_K = 3
x = torch.randn(24, 500, generator=torch.Generator().manual_seed(3))
x[::3] = (x[::3] * 2).round() / 2  # ties at the edge
p = np.array([1e-9, 0.02, 0.1, 0.5, 0.9, 1.0] * 4)
k = np.array([0] * 12 + [4, 30] * 6)
p[12:] = 1.0
opts = sampling.rows([0.8] * 24, k, p, [0.0, 1e-3] * 12, range(24), [1] * 24, [2**32 - 1] * 24)
numbers = draw.table(opts, 500)
assert draw.kinds(draw.bits(numbers)) == draw.Kinds(True, True, False, True)
want = sampling.draw_rows(x, opts)
assert torch.equal(draw.draw(x, opts, lanes=64, programs=64), want)
free = sampling.rows([0.8] * 24, [0] * 24, [1.0] * 24, [0.0, 1e-3] * 12, range(24), [1] * 24,
                     [2**32 - 1] * 24)
assert (sampling.draw_rows(x, free) != want).sum() > 8  # so many first winners lay outside

# A batch that goes on: the numbers are made once, the positions are new.
before = opts.forms.copy()
later = __import__("dataclasses").replace(opts, position=opts.position - 9)
assert torch.equal(draw.draw(x, later, lanes=64, programs=64), sampling.draw_rows(x, later))
assert later.forms is opts.forms and list(before) == list(opts.forms)
greedy = sampling.rows([0.0] * 24, k, p, [0.5] * 24, range(24), [0] * 24, [0] * 24)
assert torch.equal(draw.draw(x, greedy), sampling.draw_rows(x, greedy))
none = sampling.rows(*[[o] * 3 for o in (0, 0, 1, 0, 0, 0, 0)])
assert torch.equal(draw.rehearse(x[:3]), sampling.draw_rows(x[:3], none))
"""

LOGPROBS = """
import torch
from ops.kernels.triton import logprobs
logprobs.CHUNK = 128  # several chunks
for dtype in (torch.float32, torch.bfloat16):
    x = (torch.randn(9, 333, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    x[1, ::5] = -torch.inf
    x[2, :200] = -torch.inf  # a chunk without any
    y = logprobs.log_softmax(x)
    true = torch.log_softmax(x.double(), -1)
    live = true > -torch.inf
    assert (y[live] - true[live]).abs().max() < 4e-6 and (y[~live] == -torch.inf).all()
    token = torch.tensor([0, 332, 201, 7, 128, 127, 9, 9, 50])
    value, place = logprobs.of_tokens(x, token)
    assert torch.equal(value, y.gather(1, token[:, None])[:, 0])
    mine = value[:, None]
    at = torch.arange(333)[None]
    assert torch.equal(place, ((y > mine) | ((y == mine) & (at <= token[:, None]))).sum(1))
    for i in range(9):  # alone, in a longer row's place, and at an odd address
        odd = torch.empty(334 * 1, dtype=dtype)[1:].view(1, 333)
        odd.copy_(x[i : i + 1])
        for one in (x[i : i + 1], odd):
            assert torch.equal(logprobs.log_softmax(one)[0], y[i])
            assert torch.equal(logprobs.of_tokens(one, token[i : i + 1])[0], value[i : i + 1])
"""

COMPILED = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from ops.kernels.triton import draw, draw_filter, edits
F, I, L = "*fp32", "*i32", "*i64"
TYPES = dict(x_ptr=F, peak_ptr=F, best_ptr=F, edge_ptr=F, score_ptr=F, repetition_ptr=F,
             frequency_ptr=F, presence_ptr=F, mask_ptr=I, count_ptr=I, slot_ptr=I, position_ptr=L,
             list_x_ptr=F, table_ptr=I, id_ptr=I, list_id_ptr=I, out_ptr=L)
LAY = dict(COVER=16, LANES=512, SPLIT=False, WIDTH=12)
CASES = (
    (draw._peaks_kernel, dict(GROUP=128, TILE=16)),
    (draw._draw_kernel, dict(GROUPS=2048, CUT=True, EDGES=True, **LAY)),
    (draw._draw_kernel, dict(GROUPS=2048, CUT=False, EDGES=False, **LAY)),
    (draw._finish_kernel, dict(PARTS=4)),
    (draw._settle_kernel, dict(PARTS=4, GROUP=128, BLOCK=2048, **LAY)),
    (draw._greedy_kernel, dict(BLOCK=8192)),
    (draw_filter._edges_kernel, dict(GROUP=128, GROUPS=2048, LIST=4096, BLOCK=1024, WIDTH=12)),
    (edits._penalise_kernel, dict(BLOCK=1024)),
)
for fused in (False, True):
    found = 0
    for kernel, constants in CASES:
        names = kernel.arg_names
        types = {a: TYPES.get(a, "constexpr" if a in constants else "i32") for a in names}
        built = triton.compile(
            ASTSource(kernel, signature=types, constexprs=constants),
            target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": fused},
        )
        assert ".ftz" not in built.asm["ptx"]
        found += len(re.findall(r"\\bfma\\.", built.asm["ptx"]))
    print(fused, found)
    assert (found > 0) == fused  # fusing is what would move bits; the launcher turns it off
"""


def _run(script: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=280, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


def test_interpreted() -> None:
    _run(INTERPRETED, TRITON_INTERPRET="1")


def test_logprobs() -> None:
    _run(LOGPROBS, TRITON_INTERPRET="1")


def test_the_second_runner() -> None:
    """vLLM's tables and our sampler over them, against the definition, slots used again."""
    done = _case("")
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


@pytest.mark.parametrize("fault", ["position", "min_tokens"])
def test_a_planted_fault_of_the_second_runner_is_seen(fault: str) -> None:
    done = _case(fault)
    assert "AssertionError: step" in done.stderr, done.stderr[-2000:]


def _case(fault: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("vllm")
    return subprocess.run(
        [sys.executable, "-m", "tests.ops.runner2_case", fault],
        capture_output=True, text=True, timeout=280, check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip


def test_compiled_for_cuda_without_contraction() -> None:
    _run(COMPILED)
