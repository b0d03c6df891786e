"""Every aten operation that torch_npu registers, sent to the CPU on zero-copy views of "device"
memory, which the stand-in CANN takes from this host.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

KEY = "PrivateUse1"
# torch_npu's own kernels for these only look after memory and views, and work as they are.
KEPT = frozenset(
    """empty.memory_format empty_strided as_strided view _reshape_alias set_ set_.source_Storage
    set_.source_Storage_storage_offset set_.source_Tensor resize_ record_stream is_pinned
    _pin_memory pin_memory empty_with_format unsafe_empty_with_format is_set_to lift lift_fresh
    _has_compatible_shallow_copy_type""".split()
)
_libraries: list[torch.library.Library] = []
_generators: dict[int, tuple[int, torch.Generator, torch.Generator]] = {}


def host(x: Any) -> Any:
    """A CPU view of the same memory; anything that is no NPU tensor as it is."""
    if not isinstance(x, torch.Tensor) or x.device.type != "npu":
        return x
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    storage = x.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    octets = torch.frombuffer(memory, dtype=torch.uint8)
    view = torch.empty(0, dtype=x.dtype)
    view.set_(octets.untyped_storage(), x.storage_offset(), x.size(), x.stride())
    return view


def device(x: torch.Tensor, where: Any = "npu") -> torch.Tensor:
    """A copy of a CPU tensor on the stand-in device, with its strides."""
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=where)
    if x.numel():
        host(out).copy_(x)
    return out


def _host_generator(generator: torch.Generator) -> torch.Generator:
    seed = generator.initial_seed()
    known = _generators.get(id(generator))
    if known is None or known[0] != seed:
        fresh = torch.Generator().manual_seed(seed & 0x7FFFFFFF)
        known = _generators[id(generator)] = (seed, fresh, generator)
    return known[1]


def on_host(op: Any) -> Callable[..., Any]:
    """`op`, run on the CPU; written arguments are written, returned ones come back as they were."""
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    written = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in schema.arguments
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        where: list[Any] = []

        def come(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and x.device.type == "npu":
                where.append(x.device)
                return host(x)
            if isinstance(x, torch.Generator) and x.device.type == "npu":
                return _host_generator(x)
            if isinstance(x, torch.device) and x.type == "npu":
                where.append(x)
                return torch.device("cpu")
            return x

        def go(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                return device(x, where[0] if where else "npu")
            return x

        def argument(values: Any, named: Any, i: int) -> Any:
            return values[i] if i < len(values) else named.get(names[i])

        host_args, host_kwargs = tree_map(come, (args, kwargs))
        if "pin_memory" in host_kwargs:
            host_kwargs["pin_memory"] = False
        result = op(*host_args, **host_kwargs)
        own = [i for i, is_written in enumerate(written) if is_written]
        for i in own:
            inside = argument(host_args, host_kwargs, i)
            outside = argument(args, kwargs, i)
            if isinstance(outside, torch.Tensor) and inside.shape != outside.shape:
                outside.resize_(inside.shape)
                host(outside).copy_(inside)
        if not schema.returns:
            return None
        several = len(schema.returns) > 1
        results = result if several else (result,)
        returned = []
        for declared, value in zip(schema.returns, results, strict=True):
            if declared.alias_info is not None and declared.alias_info.is_write:
                returned.append(argument(args, kwargs, own.pop(0)))
            else:
                returned.append(tree_map(go, value))
        return tuple(returned) if several else returned[0]

    return run


def _to_copy(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    inside = host(x)
    copied = inside.to(dtype) if dtype not in (None, inside.dtype) else inside.clone()
    where = torch.device(device) if device is not None else x.device
    return copied if where.type == "cpu" else globals()["device"](copied, where)


def _copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    host(to).copy_(host(source))
    return to


SPECIAL: dict[str, Callable[..., Any]] = {
    "copy_": _copy_,
    "_to_copy": _to_copy,
    "_local_scalar_dense": lambda x: host(x).item(),
    "_copy_from": lambda source, to, non_blocking=False: _copy_(to, source),
}


def install() -> int:
    """Route every registered operation; returns how many."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    routed = 0
    for full in torch._C._dispatch_get_registrations_for_dispatch_key(KEY):
        space, _, name = full.partition("::")
        if space != "aten" or name in KEPT or name in SPECIAL:
            continue
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        op = getattr(packet, overload or "default", None)
        if op is None:
            continue
        library.impl(name, on_host(op), KEY)
        routed += 1
    for name, kernel in SPECIAL.items():
        library.impl(name, kernel, KEY)
    return routed + len(SPECIAL)


def autoload() -> None:
    """The entry point of group torch.backends: runs at the end of `import torch`."""
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
    import torch_npu  # noqa: F401

    if _libraries:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        install()
        from samebits_standin import hccl, ops

        ops.install()
        if int(os.environ.get("STANDIN_NPUS", "1")) > 1:
            hccl.install()
    if "STANDIN_TAKE_OUT" in os.environ:  # a refusal of the project's, out of every process
        from tests.ascend import taken_out

        taken_out.apply(os.environ["STANDIN_TAKE_OUT"])
    _name_ascend_builtins()


def _name_ascend_builtins() -> None:
    """Triton-Ascend's own builtins, by name: vllm-ascend looks them up when it is imported."""
    import triton.language

    for name in ("insert_slice", "extract_slice", "get_element"):
        if not hasattr(triton.language, name):
            setattr(triton.language, name, None.__class__)
