"""The Triton form: the definition's tokens in Triton's interpreter, and no contraction in its PTX.

The interpreter and the compiler each need a process of their own: Triton decides at import.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
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
"""

COMPILED = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from ops.kernels.triton import draw, draw_filter
F, I, L = "*fp32", "*i32", "*i64"
TYPES = dict(x_ptr=F, peak_ptr=F, best_ptr=F, edge_ptr=F, score_ptr=F,
             list_x_ptr=F, stream_ptr=I, id_ptr=I, list_id_ptr=I, out_ptr=L)
CASES = (
    (draw._peaks_kernel, dict(GROUP=128, TILE=16)),
    (draw._draw_kernel, dict(GROUPS=2048, COVER=16, LANES=512, SPLIT=False, FILTERED=True)),
    (draw._finish_kernel, dict(PARTS=4)),
    (draw_filter._edges_kernel, dict(GROUP=128, GROUPS=2048, LIST=4096, BLOCK=1024)),
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


def test_compiled_for_cuda_without_contraction() -> None:
    _run(COMPILED)
