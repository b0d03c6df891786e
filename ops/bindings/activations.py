"""Activation functions: torch's vector loop and its scalar tail disagree, so a flat tensor's
position shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ops.kernels.cpu import load
from ops.registry import NotInstalled, Override

# vLLM's class -> (kernel kind, gated). A gated one halves its input: act(x[:h]) · x[h:].
KINDS: dict[str, tuple[str, bool]] = {
    "SiluAndMul": ("silu", True),
    "GELU": ("gelu", False),
    "NewGELU": ("gelu_new", False),
    "FastGELU": ("gelu_fast", False),
    "QuickGELU": ("quick_gelu", False),
    "ReLUSquaredActivation": ("relu2", False),
}


def rows() -> list[Override]:
    """Override rows for vLLM's activation layers."""
    from ops import selfcheck

    kernels = load()
    names = [*KINDS, "GeluAndMul"]
    return [
        Override(
            op=f"vllm.{name}",
            kernel=f"{kernels.name}:act",
            reason="the exponential of the vector loop and of its tail differ: bits depend on "
            "the position",
            install=_installer(name),
            installed=_looker(name),
            check=selfcheck.check(f"vllm.{name}"),
        )
        for name in names
    ]


def _installer(name: str) -> Callable[[], None]:
    def install() -> None:
        from vllm.model_executor.layers import activation

        kernels = load()
        layer = getattr(activation, name)
        if name == "GeluAndMul":
            layer.forward = _gelu_and_mul(kernels.act_and_mul)
            return
        kind, gated = KINDS[name]
        layer.forward = _forward(kernels.act_and_mul if gated else kernels.act, kind)

    return install


def _forward(kernel: Any, kind: str) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = kernel(x, kind)
        return out

    forward.samebits = True  # type: ignore[attr-defined]
    return forward


def _gelu_and_mul(kernel: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.approximate not in ("none", "tanh"):
            raise NotInstalled(
                f"vllm.GeluAndMul(approximate={self.approximate!r}): no proven kernel"
            )
        out: torch.Tensor = kernel(x, "gelu" if self.approximate == "none" else "gelu_tanh")
        return out

    forward.samebits = True  # type: ignore[attr-defined]
    return forward


def _looker(name: str) -> Callable[[], bool]:
    def installed() -> bool:
        from vllm.model_executor.layers import activation

        return getattr(getattr(activation, name).forward, "samebits", False)

    return installed
