"""What test_ascend_bindings runs in the interpreter's process: the Ascend ops on CPU tensors.

    TRITON_INTERPRET=1 python -m tests.ops.ascend_cases [planted]

planted: a sum whose block is as long as there are rows. Prints what held as JSON. fp16, because the
interpreter's bf16 products are wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ops import bindings_ascend as bind

ROWS = 19


def random(*shape: int, seed: int = 1, std: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).half()


def reference_rotary(x: Tensor, table: Tensor, neox: bool) -> Tensor:
    """One pair at a time."""
    heads = x.float().view(len(x), -1, 32)
    out = heads.clone()
    half = table.shape[1] // 2
    for j in range(half):
        a, b = (j, j + half) if neox else (2 * j, 2 * j + 1)
        cos, sin = table[:, j, None], table[:, half + j, None]
        out[..., a] = heads[..., a] * cos - heads[..., b] * sin
        out[..., b] = heads[..., b] * cos + heads[..., a] * sin
    return out.half().view(x.shape)


def ops() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """{name: (ours, torch's)} as functions of [rows, 64] rows."""
    weight, bias = random(40, 64, seed=2, std=0.1), random(40, seed=3)
    gamma, table = random(64, seed=4).abs(), random(ROWS, 24, seed=5).float()

    def torchs_norm(x: Tensor) -> Tensor:
        f = x.float()
        scaled = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (scaled.half() * gamma).half()

    def swiglu(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate).half() * up).half()

    return {
        "linear": (
            lambda x: bind.linear(x, weight, bias),
            lambda x: (x.float() @ weight.float().t() + bias.float()).half(),
        ),
        "addmm": (
            lambda x: bind.addmm(bias, x, weight.t(), beta=2),
            lambda x: (2 * bias.float() + x.float() @ weight.float().t()).half(),
        ),
        "softmax": (lambda x: bind.softmax_int(x, -1), lambda x: torch.softmax(x.float(), -1)),
        "log_softmax": (
            lambda x: bind.log_softmax(x, -1, False),
            lambda x: torch.log_softmax(x.float(), -1),
        ),
        "sum": (  # of products that fp32 rounds, so that the order shows
            lambda x: bind.sum_dims(x.float() * 1.1, [-1], True),
            lambda x: (x.float() * 1.1).sum(-1, keepdim=True),
        ),
        "mean": (lambda x: bind.mean_dims(x, [1]), lambda x: x.float().mean(1)),
        "norm": (lambda x: bind.npu_rms_norm(x, gamma)[0], torchs_norm),
        "swiglu": (bind.npu_swiglu, swiglu),
        "rotary": (
            lambda x: bind.rotary(x, table[: len(x)], 32, 24, True),
            lambda x: reference_rotary(x, table[: len(x)], True),
        ),
        "rotary, neighbours": (
            lambda x: bind.rotary(x, table[: len(x)], 32, 24, False),
            lambda x: reference_rotary(x, table[: len(x)], False),
        ),
    }


def main(planted: bool) -> None:
    bind._ascendc = lambda name: lambda a, b: bind.bmm(a[None], b[None])[0]
    if planted:
        from ops.kernels.triton import reduce

        stock = reduce.sum_dims

        def by_rows(x: Tensor, *more: object) -> Tensor:
            reduce.BLOCK = 8 if len(x) > 4 else 32
            return stock(x, *more)  # type: ignore[arg-type]

        reduce.sum_dims = by_rows
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))  # in some, no bit tells
    x = random(ROWS, 64) * torch.logspace(-2, 2, 64)[order].half()
    found: dict[str, list[str]] = {"close": [], "rows": [], "slabs": []}
    for name, (ours, torchs) in ops().items():
        whole = ours(x)
        want = torchs(x).float()
        if (whole.float() - want).norm() <= 2e-3 * want.norm():
            found["close"].append(name)
        if all(torch.equal(ours(x[:m].contiguous()), whole[:m]) for m in (1, 2, 7)):
            found["rows"].append(name)
        kept, bind.GRID = bind.GRID, 5
        if torch.equal(ours(x), whole):
            found["slabs"].append(name)
        bind.GRID = kept
    weights, ids = bind.route(random(ROWS, 8, seed=9), 3, True)
    alone = [bind.route(random(ROWS, 8, seed=9)[r : r + 1], 3, True) for r in range(ROWS)]
    found["route"] = [
        str(torch.equal(weights, torch.cat([w for w, _ in alone]))),
        str(torch.equal(ids, torch.cat([i for _, i in alone]))),
        str(torch.allclose(weights.sum(-1), torch.ones(ROWS), atol=1e-6)),
    ]
    found["names"] = list(ops())
    print(json.dumps(found))


if __name__ == "__main__":
    main("planted" in sys.argv[1:])
