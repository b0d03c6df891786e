"""An `npu` device made in Python, without torch_npu: what the Ascend bindings do to the dispatcher.

    python -m tests.ops.npu_device        prints one JSON object; a process of its own

TAKE_OUT names a refusal that is taken out first: tests/ops/taken_out.py.

A device's name and its kernels belong to the whole process, so the tests run this as a child.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

OWN = (
    "mm addmm bmm baddbmm _softmax _log_softmax sum sum.dim_IntList mean mean.dim".split()
)  # fmt: skip


class NpuTensor(torch.Tensor):
    """A tensor that says it lives on an NPU and keeps its values in a CPU tensor."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Any:
        made = torch._C._acc.create_empty_tensor(list(raw.shape), raw.dtype)  # type: ignore[attr-defined]
        made.__class__ = NpuTensor
        return made

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw


def inside(x: Any) -> Any:
    return x.raw if isinstance(x, NpuTensor) else x


def outside(x: Any) -> Any:
    return NpuTensor(x) if isinstance(x, torch.Tensor) and not isinstance(x, NpuTensor) else x


def make_device() -> list[torch.library.Library]:
    backend_registration._setup_privateuseone_for_python_backend("npu")  # type: ignore[attr-defined]
    aten, every = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")

    def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        args, kwargs = tree_map(inside, (args, kwargs))
        return tree_map(outside, op(*args, **kwargs))

    def empty(size: Any, dtype: Any = None, **_: Any) -> Any:
        return outside(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Any:
        return outside(torch.empty_strided(size, stride, dtype=dtype))

    def copy(source: Any, to: Any, non_blocking: bool = False) -> Any:
        inside(to).copy_(inside(source))
        return to

    every.fallback(fallback, "PrivateUse1")
    aten.impl("empty.memory_format", empty, "PrivateUse1")
    aten.impl("empty_strided", empty_strided, "PrivateUse1")
    aten.impl("_copy_from", copy, "PrivateUse1")
    for name in OWN:  # kernels of the device's own, as torch_npu brings them
        aten.impl(name, on_cpu(name), "PrivateUse1")
    return [aten, every]


def on_cpu(name: str) -> Any:
    """The op itself on the values: here it is the binding that is tested, not the kernel."""
    from ops import bindings_ascend as bind

    op = bind._overload(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(inside, (args, kwargs))
        return tree_map(outside, op(*args, **kwargs))

    return run


def calls() -> dict[str, Any]:
    x = torch.randn(3, 4).half()
    w, b = torch.randn(5, 4).half(), torch.randn(5).half()
    F = torch.nn.functional
    n, wn, bn = (t.to("npu") for t in (x, w, b))
    deep = x.expand(2, 3, 4).contiguous().to("npu")
    return {
        "x @ w": lambda: n @ wn.t().contiguous(),
        "mm": lambda: torch.mm(n, wn.t().contiguous()),
        "F.linear": lambda: F.linear(n, wn),
        "F.linear with bias": lambda: F.linear(n, wn, bn),
        "F.linear of 3 dimensions": lambda: F.linear(deep, wn),
        "addmm": lambda: torch.addmm(bn, n, wn.t().contiguous()),
        "bmm": lambda: torch.bmm(deep, deep.transpose(1, 2).contiguous()),
        "softmax": lambda: torch.softmax(n, -1),
        "F.softmax to fp32": lambda: F.softmax(n, -1, dtype=torch.float32),
        "log_softmax": lambda: torch.log_softmax(n, -1),
        "Tensor.sum(dim)": lambda: n.sum(-1),
        "torch.sum(dim)": lambda: torch.sum(n, -1),
        "sum": lambda: n.sum(),
        "Tensor.mean(dim)": lambda: n.mean(-1, keepdim=True),
        "mean": lambda: n.mean(),
        "sum of integers": lambda: torch.arange(5).to("npu").sum(),
    }


def hit_by(call: Any) -> list[str]:
    from ops import bindings_ascend as bind

    before = dict(bind.hits)
    try:
        call()
    except Exception as fault:
        return [f"{type(fault).__name__}: {fault}"[:200]]
    return sorted(name for name, count in bind.hits.items() if count > before.get(name, 0))


def main() -> None:
    warnings.simplefilter("ignore")
    if "TAKE_OUT" in os.environ:
        from tests.ops import taken_out

        taken_out.apply(os.environ["TAKE_OUT"])
    kept = make_device()
    from ops import bindings_ascend as bind
    from ops.registry import NotInstalled

    wrong = torch.library.Library("aten", "IMPL")  # as vllm-ascend 0.23.0.post1 does it
    reached: list[str] = []
    wrong.impl("softmax", lambda *a, **k: reached.append("softmax"), "NPU")
    torch.softmax(torch.ones(2, 3).to("npu"), -1)
    found: dict[str, Any] = {"an overload that nothing calls": len(reached)}
    del wrong

    mine = torch.library.Library("aten", "IMPL")
    mine.impl("mm", on_cpu("mm"), "NPU")
    try:
        bind.bind_aten("mm")
        found["second owner"] = "taken"
    except NotInstalled as fault:
        found["second owner"] = str(fault)
    mine._destroy()

    for name, (_, kernel) in list(bind.ATEN.items()):
        bind.ATEN[name] = (on_cpu(name), kernel)
        bind.bind_aten(name)
    found["bound"] = {name: bind.aten_is_ours(name) for name in bind.ATEN}
    found["hits"] = {what: hit_by(call) for what, call in calls().items()}
    later = torch.library.Library("aten", "IMPL")
    later.impl("mm", on_cpu("mm"), "PrivateUse1", allow_override=True)
    found["after a third party"] = bind.aten_is_ours("mm")
    print(json.dumps(found))
    del kept, later


if __name__ == "__main__":
    main()
