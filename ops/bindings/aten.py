"""The net under everything: torch's own ops whose order of sums, or whose exponentials, follow the
shape of the batch.

Each is replaced under torch's CPU key, so that whatever a model calls, nothing reaches a vendor
library unseen. Float tensors go to our kernels; other dtypes (integers, float64), whose results
don't pass through a model's activations, keep torch's kernel.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.kernels.cpu import load
from ops.registry import Override

_OURS = (torch.float32, torch.bfloat16, torch.float16)
_state: dict[str, Any] = {}


def rows() -> list[Override]:
    """One row per aten op."""
    from ops import selfcheck

    kernels = load()
    return [
        Override(
            op=f"aten::{name}",
            kernel=f"{kernels.name}:{kernel}",
            reason=reason,
            install=_installer(name, make),
            installed=_looker(name),
            check=selfcheck.check(f"aten::{name}"),
        )
        for name, (kernel, reason, make) in _TABLE.items()
    ]


Maker = Callable[[Any, Callable[..., Any]], Callable[..., Any]]


def _installer(name: str, make: Maker) -> Callable[[], None]:
    def install() -> None:
        library = _state.setdefault("library", torch.library.Library("aten", "IMPL"))
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

        def stock(*args: Any, **kwargs: Any) -> Any:
            return kernel.call_boxed(keys, *args, **kwargs)

        bound = make(load(), stock)
        _state[name] = bound
        with warnings.catch_warnings():  # torch warns that an op is overridden: that is the purpose
            warnings.simplefilter("ignore")
            library.impl(name, bound, "CPU", allow_override=True)

    return install


def _looker(name: str) -> Callable[[], bool]:
    def installed() -> bool:
        """Whether the dispatcher holds a Python kernel under the CPU key and it is the one we put
        there.
        """
        held = torch._C._dispatch_dump_table(f"aten::{name}")
        line = next((row for row in held.splitlines() if row.startswith("CPU:")), "")
        return name in _state and "aten.py" in line

    return installed


def _mm(kernels: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def mm(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype not in _OURS:
            return stock(a, b)
        return kernels.linear(a.contiguous(), kernels.pack_weight(b.t().contiguous().clone()))

    return mm


def _addmm(kernels: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if a.dtype not in _OURS:
            return stock(bias, a, b, beta=beta, alpha=alpha)
        y = kernels.linear(a.contiguous(), kernels.pack_weight(b.t().contiguous().clone()))
        if alpha != 1:
            y = y * alpha
        return y if beta == 0 else y + (bias if beta == 1 else bias * beta)

    return addmm


def _bmm(kernels: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def bmm(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype not in _OURS:
            return stock(a, b)
        out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
        for i in range(a.shape[0]):
            out[i] = kernels.linear(
                a[i].contiguous(), kernels.pack_weight(b[i].t().contiguous().clone())
            )
        return out

    return bmm


def _baddbmm(kernels: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    inner = _bmm(kernels, stock)

    def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if a.dtype not in _OURS:
            return stock(bias, a, b, beta=beta, alpha=alpha)
        y = inner(a, b)
        if alpha != 1:
            y = y * alpha
        return y if beta == 0 else y + (bias if beta == 1 else bias * beta)

    return baddbmm


def _mv(kernels: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def mv(a: Tensor, v: Tensor) -> Tensor:
        if a.dtype not in _OURS:
            return stock(a, v)
        return kernels.linear(
            a.contiguous(), kernels.pack_weight(v.reshape(1, -1).clone())
        ).squeeze(-1)

    return mv


def _dot(kernels: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def dot(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype not in _OURS:
            return stock(a, b)
        return kernels.linear(
            a.reshape(1, -1), kernels.pack_weight(b.reshape(1, -1).clone())
        ).reshape(())

    return dot


def _softmax(kernels: Any, stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        if x.dtype not in _OURS:
            return stock(x, dim, half_to_float)
        moved = x.movedim(dim, -1)
        flat = getattr(kernels, name)(moved.reshape(-1, moved.shape[-1]).contiguous())
        y = flat.reshape(moved.shape).movedim(-1, dim).contiguous()
        return y if half_to_float else y.to(x.dtype)

    return softmax


def _reduce(kernels: Any, stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    kernel = getattr(kernels, name)

    def reduce(
        x: Tensor,
        dim: Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        wanted = dtype or x.dtype
        if wanted not in _OURS or x.dtype not in _OURS:
            if dtype is None:
                return stock(x, dim, keepdim)
            return stock(x, dim, keepdim, dtype=dtype)
        axes = sorted({d % max(x.ndim, 1) for d in dim}) if dim else list(range(x.ndim))
        kept = [d for d in range(x.ndim) if d not in axes]
        size = math.prod(x.shape[d] for d in axes)
        flat = x.float().permute(*kept, *axes).reshape(-1, size).contiguous()
        y = kernel(flat, -1).to(wanted).reshape([x.shape[d] for d in kept])
        return y.reshape([1 if d in axes else x.shape[d] for d in range(x.ndim)]) if keepdim else y

    return reduce


def _sum_all(kernels: Any, stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    kernel = getattr(kernels, name)

    def reduce(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        wanted = dtype or x.dtype
        if wanted not in _OURS or x.dtype not in _OURS:
            return stock(x) if dtype is None else stock(x, dtype=dtype)
        return kernel(x.float().reshape(1, -1).contiguous(), -1).to(wanted).reshape(())

    return reduce


def _layer_norm(kernels: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def layer_norm(
        x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if x.dtype not in _OURS:
            return stock(x, shape, weight, bias, eps)
        flat = x.reshape(-1, math.prod(shape)).contiguous()
        y = kernels.layer_norm(
            flat,
            None if weight is None else weight.reshape(-1),
            None if bias is None else bias.reshape(-1),
            eps,
        )
        # Mean and 1/std serve the backward pass only: there is none here.
        return y.reshape(x.shape), x.new_empty(0), x.new_empty(0)

    return layer_norm


def _unary(kernels: Any, stock: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def unary(x: Tensor) -> Tensor:
        if x.dtype not in _OURS:
            return stock(x)
        return kernels.act(x.contiguous(), kind)

    return unary


def _gelu(kernels: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
        if x.dtype not in _OURS:
            return stock(x, approximate=approximate)
        return kernels.act(x.contiguous(), "gelu" if approximate == "none" else "gelu_tanh")

    return gelu


def _trig(kernels: Any, stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    def trig(x: Tensor) -> Tensor:
        if x.dtype not in _OURS:
            return stock(x)
        return _sin_cos(x.double(), name).to(x.dtype)

    return trig


_HALF_PI = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)  # 33 + 33 + 53 bits


def _sin_cos(x: Tensor, name: str) -> Tensor:
    """sin or cos in float64 by multiply and add alone: |x| < 2^20, error below 1e-15. For tables
    of rotary angles.
    """
    n = torch.round(x * (2.0 / math.pi))
    r = x - n * _HALF_PI[0]
    r = r - n * _HALF_PI[1]
    r = r - n * _HALF_PI[2]
    z = r * r
    sin, cos = torch.zeros_like(z), torch.zeros_like(z)
    for i in range(9, -1, -1):
        sin = sin * z + (-1) ** i / math.factorial(2 * i + 1)
        cos = cos * z + (-1) ** i / math.factorial(2 * i)
    sin = sin * r
    quadrant = (n.long() + (1 if name == "cos" else 0)) % 4
    odd = quadrant % 2 == 1
    y = torch.where(odd, cos, sin)
    return torch.where(quadrant >= 2, -y, y)


_BLAS = "BLAS picks tiles, and so the order along K, by the shapes"
_VECTOR = (
    "the vector loop and its tail differ in the last bit: bits depend on the position in the tensor"
)
_ORDER = "the order of the sum follows shape, strides and threads"
_TABLE: dict[str, tuple[str, str, Maker]] = {
    "mm": ("linear", _BLAS, _mm),
    "addmm": ("linear", _BLAS, _addmm),
    "bmm": ("linear", _BLAS, _bmm),
    "baddbmm": ("linear", _BLAS, _baddbmm),
    "mv": ("linear", _BLAS, _mv),
    "dot": ("linear", _BLAS, _dot),
    "_softmax": ("softmax", _VECTOR, lambda k, s: _softmax(k, s, "softmax")),
    "_log_softmax": ("log_softmax", _VECTOR, lambda k, s: _softmax(k, s, "log_softmax")),
    "sum.dim_IntList": ("sum", _ORDER, lambda k, s: _reduce(k, s, "sum")),
    "mean.dim": ("mean", _ORDER, lambda k, s: _reduce(k, s, "mean")),
    "mean": ("mean", _ORDER, lambda k, s: _sum_all(k, s, "mean")),
    "sum": ("sum", _ORDER, lambda k, s: _sum_all(k, s, "sum")),
    "native_layer_norm": ("layer_norm", _ORDER, _layer_norm),
    "gelu": ("act", _VECTOR, _gelu),
    "silu": ("act", _VECTOR, lambda k, s: _unary(k, s, "silu")),
    "sigmoid": ("act", _VECTOR, lambda k, s: _unary(k, s, "sigmoid")),
    "tanh": ("act", _VECTOR, lambda k, s: _unary(k, s, "tanh")),
    "cos": ("torch64", _VECTOR, lambda k, s: _trig(k, s, "cos")),
    "sin": ("torch64", _VECTOR, lambda k, s: _trig(k, s, "sin")),
}
