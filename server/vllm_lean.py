"""A start without what an eager text server on the CPU never uses.

Importing vLLM brings in torch's compiler (patches for it, in `vllm.env_override`), signal
processing for audio, and model code for images: two thirds of the time of the import. On the CPU
everything runs eagerly by rule (`config.determinism`), so the compiler has nothing to do here, and
`torch.compile` hands functions back as they are: no kernel that was fused by shape can slip in.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

# Loaded at first use of an attribute, if ever.
LAZY = ("scipy.signal", "scipy.stats", "vllm.entrypoints.mcp.tool_server")

# What other modules of vLLM call in its patches for the compiler.
COMPILER_PATCHES = ("_apply_constrain_to_fx_strides_patch",)


class _LazyFinder(MetaPathFinder):
    """Makes the named modules load when they are first touched."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        self._names.discard(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def _compile(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Stands for `torch.compile` in an eager process: the function as it is."""
    return (lambda function: function) if model is None else model


def prepare() -> None:
    """Set the process up, before vLLM is imported. Does nothing if vLLM is already there."""
    if "vllm" in sys.modules:
        return
    import torch

    patches = types.ModuleType("vllm.env_override")
    for name in COMPILER_PATCHES:
        setattr(patches, name, lambda *_args: None)
    sys.modules[patches.__name__] = patches
    sys.meta_path.insert(0, _LazyFinder(LAZY))
    torch.compile = _compile
