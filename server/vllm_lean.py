"""A start without what an eager text server on the CPU never uses.

Importing vLLM brings in torch's compiler, Triton, signal processing for audio, and model code for
images: two thirds of the time of the import. On the CPU everything runs eagerly by rule
(`config.determinism`), so the compiler has nothing to do here: `torch.compile` hands functions back
as they are, no kernel that was fused by shape can slip in, and of the compiler's modules only the
names that others import from them exist. Anything else asked of them is an ImportError or an
AttributeError with the module's name.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

# Loaded at first use of an attribute, if ever.
LATER = ("scipy.optimize", "scipy.signal", "scipy.stats")

# What other modules of vLLM call in its patches for the compiler.
COMPILER_PATCHES = ("_apply_constrain_to_fx_strides_patch",)

# Modules of the compiler, of training and of MCP, and what is imported from each by name:
# decorators and marks, which do nothing, and classes, which can't be made. Modules below them that
# are not named here are loaded as they are.
STAND_INS: dict[str, str] = {
    "torch._dynamo": "allow_in_graph assume_constant_result disable is_compiling mark_dynamic",
    "torch._dynamo.aot_compile_types": "BundledAOTAutogradSerializableCallable",
    "torch._dynamo.decorators": "mark_unbacked",
    "torch._dynamo.symbolic_convert": "InliningInstructionTranslator",
    "torch._dynamo.trace_rules": "clear_lru_cache",
    "torch._dynamo.utils": "dynamo_timed lazy_format_graph_code",
    "torch._inductor": "",
    "torch._inductor.compile_fx": "",
    "torch._inductor.pattern_matcher": "PatternMatcherPass",
    "torch._inductor.runtime": "",
    "torch._inductor.runtime.triton_heuristics": "CachingAutotuner",
    "torch._inductor.standalone_compile": "AOTCompiledArtifact CompiledArtifact",
    "torch.fx._graph_pickler": "GraphPickler Options",
    "transformers.loss.loss_utils": "LOSS_MAPPING",
    "vllm.entrypoints.mcp.tool_server": "ToolServer",
}


class _Later(types.ModuleType):
    """A module that is loaded when a name of its own is asked for. (importlib's LazyLoader loads at
    any look, and `inspect` looks at every module.)
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        spec = self.__dict__.pop("_real", None)
        if spec is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        self.__spec__ = spec
        spec.loader.exec_module(self)
        return getattr(self, name)


class _Finder(MetaPathFinder, Loader):
    """Puts stand-ins and modules for later in the place of those that are named above."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname not in STAND_INS and fullname not in LATER:
            return None
        real = PathFinder.find_spec(fullname, path)
        if real is None:
            return None
        below = real.submodule_search_locations
        spec = ModuleSpec(fullname, self, is_package=below is not None)
        spec.loader_state = real
        if below is not None:
            spec.submodule_search_locations = list(below)
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        if spec.name not in LATER:
            return None
        module = _Later(spec.name)
        module.__dict__["_real"] = spec.loader_state
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        for name in STAND_INS.get(module.__name__, "").split():
            setattr(module, name, _Compiled if name[0].isupper() else _mark)


class _Compiled:
    """Stands for a class of the compiler."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("torch's compiler is not loaded: this server runs eagerly")


def _mark(function: Any = None, *_: Any, **__: Any) -> Any:
    """Stands for a decorator, plain or with arguments, and for a mark on a tensor."""
    return function if callable(function) else lambda decorated: decorated


def _is_compiling() -> bool:
    return False


def _compile(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Stands for `torch.compile` in an eager process: the function as it is."""
    return _mark(model)


def prepare() -> None:
    """Set the process up, before vLLM is imported. Does nothing if vLLM is already there."""
    if "vllm" in sys.modules:
        return
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # importing it is an ImportError
    import torch

    patches = types.ModuleType("vllm.env_override")
    for name in COMPILER_PATCHES:
        setattr(patches, name, lambda *_args: None)
    sys.modules[patches.__name__] = patches
    torch.compile = _compile
    sys.meta_path.insert(0, _Finder())
    if "torch._dynamo" not in sys.modules:
        for name in STAND_INS:  # torch and vLLM reach them as attributes
            if name.startswith("torch._dynamo"):
                importlib.import_module(name)
        torch._dynamo.is_compiling = _is_compiling
