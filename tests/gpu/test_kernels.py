"""Bits of the kernels on a real GPU. Skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU in this machine", allow_module_level=True)

from ops import bindings_cuda_check as checks
from ops.kernels import cublaslt
from ops.kernels.dense import BANDS, Planner, by_triton
from ops.kernels.triton import attention as att
from ops.kernels.triton import moe, norm, softmax
from ops.kernels.triton.linear import Tile, linear
from ops.registry import NotInvariant

pytestmark = pytest.mark.gpu
TILES = [Tile(16, 16, 256, 2, 5), Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4),
         Tile(64, 16, 128, 4, 5), Tile(64, 128, 64, 4, 5), Tile(128, 128, 64, 8, 4),
         Tile(128, 256, 64, 8, 3)]  # fmt: skip
SHAPES = [(4096, 2048), (2048, 6144), (4096, 12288), (576, 576), (128, 2048)]


def test_numbers_are_right() -> None:
    """Values, not only invariance: ones times arange, which float32 holds exactly."""
    x = torch.ones(3, 8192, device="cuda")
    w = torch.arange(8192, device="cuda", dtype=torch.float32).repeat(16, 1) % 64
    y = linear(x, w, tile=Tile(32, 32, 32, 4, 2))
    assert torch.equal(y, torch.full_like(y, 8192 / 64 * (63 * 64 / 2)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("split", [1, 2, 4])
def test_tiles_and_passes_give_equal_bits(shape: tuple[int, int], split: int) -> None:
    n, k = shape
    x, w, b = (
        checks._randn(300, k),
        checks._randn(n, k, seed=1, scale=0.03),
        checks._randn(n, seed=2),
    )
    want = linear(x, w, b, tile=TILES[0], split=split)
    for tile in TILES:
        for two_pass in (False, True):
            try:
                got = linear(x, w, b, tile=tile, split=split, two_pass=two_pass)
            except Exception as fault:
                if "out of resource" in str(fault):
                    continue
                raise
            checks.same("linear", f"{tile} {two_pass}", got, want)
        checks.same("linear", f"{tile} one row", linear(x[257:258], w, b, tile=tile, split=split),
                    want[257:258])  # fmt: skip
    if k >= 2048:  # the planted fault: another order of the same sum
        other = linear(x, w, b, tile=TILES[0], split=3 - split if split < 3 else 1)
        checks.must_differ("linear", "another split", other, want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_plan_equals_the_definition(shape: tuple[int, int], bias: bool) -> None:
    n, k = shape
    w = checks._randn(n, k, seed=1, scale=0.03)
    b = checks._randn(n, seed=2) if bias else None
    planner = Planner()
    planner.plan(w, b)
    x = checks._randn(BANDS[-1], k)
    want = by_triton(x, w, b)
    for rows in (1, 2, 8, 9, 63, 64, 65, 255, 256, 257, 1000, 4097, BANDS[-1]):
        got = planner.product(x[-rows:], w, b)
        checks.same("plan", f"{rows} rows", got, want[-rows:])
    names = {band.name for band in planner.plan(w, b)}
    assert any(name.startswith("cublaslt") for name in names), names


def test_stock_linear_is_not_invariant() -> None:
    """The fault that all this is about is there, and the comparison sees it."""
    w = checks._randn(4096, 12288, seed=1, scale=0.03)
    x = checks._randn(512, 12288)
    whole = torch.nn.functional.linear(x, w)
    with pytest.raises(NotInvariant):
        for rows in (1, 16, 64):
            checks.same("F.linear", f"{rows} rows", torch.nn.functional.linear(x[:rows], w),
                        whole[:rows])  # fmt: skip


def test_algorithms_are_unsplit() -> None:
    for algorithm in cublaslt.algorithms(1, 4096, 12288, torch.bfloat16, 8):
        config = dict(algorithm.config)
        assert config["split_k"] <= 1 and config["reduction"] == 0, algorithm


@pytest.mark.parametrize("option", [{}, {"window": 200}, {"softcap": 30.0}])
def test_attention_schedules_give_equal_bits(option: dict[str, float]) -> None:
    contexts = [1500, 300, 64, 17, 777]
    d = checks.paged(contexts, 32, 8, 128)
    start = torch.tensor([0, *contexts], device="cuda").cumsum(0).int()
    lengths = torch.tensor(contexts, device="cuda", dtype=torch.int32)

    def run(schedule: att.Schedule, parallel: int) -> torch.Tensor:
        return att.attention(d["q"], d["k"], d["v"], d["table"], start, lengths, 128**-0.5,
                             schedule=schedule, segment=512, parallel_segments=parallel,
                             **option)  # fmt: skip

    want = run(att.Schedule(64, 4, 2), 0)
    for schedule in (att.Schedule(16, 4, 3), att.Schedule(16, 2, 2), att.Schedule(128, 8, 2)):
        for parallel in (0, 3):
            checks.same("attention", f"{schedule} {parallel}", run(schedule, parallel), want)
    ends = (start[1:] - 1).long()
    ones = torch.arange(6, device="cuda", dtype=torch.int32)
    decode = att.attention(d["q"][ends], d["k"], d["v"], d["table"], ones, lengths, 128**-0.5,
                           schedule=att.Schedule(16, 4, 3), segment=512, parallel_segments=3,
                           **option)  # fmt: skip
    checks.same("attention", "decode against prompt", decode, want[ends])
    if not option:
        flash = checks.flash(d["q"], d["k"], d["v"], d["table"], contexts, contexts)
        assert ((flash.float() - want.float()).norm() / want.float().norm()) < 1e-2
    checks.must_differ("attention", "other segments", att.attention(
        d["q"], d["k"], d["v"], d["table"], start, lengths, 128**-0.5, segment=256,
        schedule=att.Schedule(64, 4, 2), **option), want)  # fmt: skip


def test_moe_tiles_give_equal_bits() -> None:
    x, w13 = checks._randn(300, 1024), checks._randn(16, 1024, 1024, scale=0.03)
    w2 = checks._randn(16, 1024, 512, seed=2, scale=0.03)
    scores = checks._randn(300, 16, seed=3, dtype=torch.float32)
    weights, ids = torch.softmax(scores, -1).topk(4, -1)
    want = moe.moe(x, w13, w2, weights, ids, tile=Tile(16, 64, 128, 4, 4))
    for tile in (Tile(64, 64, 64, 4, 4), Tile(128, 128, 64, 8, 3)):
        checks.same("moe", f"{tile}", moe.moe(x, w13, w2, weights, ids, tile=tile), want)
        one = moe.moe(x[9:10], w13, w2, weights[9:10], ids[9:10], tile=tile)
        checks.same("moe", f"{tile} alone", one, want[9:10])
    # The planted fault: the same sums over the inner columns, backwards. (Slots in another order
    # would not do: they are bfloat16, and float32 adds four of them almost always exactly.)
    gate, up = w13.chunk(2, 1)
    backwards = torch.cat((gate.flip(1), up.flip(1)), 1).contiguous()
    other = moe.moe(x, backwards, w2.flip(2).contiguous(), weights, ids,
                    tile=Tile(16, 64, 128, 4, 4))  # fmt: skip
    checks.must_differ("moe", "inner columns backwards", other, want)


def test_rows_of_norm_and_softmax_alone_and_together() -> None:
    x, w = checks._randn(300, 2048), checks._randn(2048, seed=1)
    y = norm.rms_norm(x, w, 1e-6)[0]
    logits = checks._randn(40, 50257, dtype=torch.float32)
    p = softmax.log_softmax(logits)
    for row in (0, 1, 39):
        checks.same("rms_norm", f"row {row}", norm.rms_norm(x[row : row + 1], w, 1e-6)[0],
                    y[row : row + 1])  # fmt: skip
        checks.same("log_softmax", f"row {row}", softmax.log_softmax(logits[row : row + 1]),
                    p[row : row + 1])  # fmt: skip
    reference = torch.log_softmax(logits.double(), -1).float()
    assert (p - reference).abs().max() < 1e-5
    checks.must_differ(
        "log_softmax", "another sum", torch.log_softmax(logits.flip(1), -1).flip(1), p
    )


@pytest.mark.parametrize("check", ["check_linear", "check_norm", "check_attention", "check_moe"])
def test_start_checks_hold(check: str) -> None:
    pytest.importorskip("vllm")
    getattr(checks, check)()
