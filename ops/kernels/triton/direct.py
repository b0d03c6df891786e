"""Launches that do not look for their kernel anew.

Triton binds and inspects every argument of every launch to find the compiled kernel, which takes
the host longer than a small kernel runs. Where the caller can say in a few words all that a kernel
is specialised on, the compiled one is kept and called.
"""

from __future__ import annotations

from typing import Any

import torch

_made: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def place(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """What Triton makes of these tensors when it specialises: types, alignment, device."""
    found: list[Any] = [tensors[0].device.index]
    for t in tensors:
        found += (t.dtype, t.data_ptr() & 15)
    return tuple(found)


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], meta: dict[str, Any],
    key: tuple[Any, ...],
) -> None:  # fmt: skip
    """kernel[grid](*args, **meta). `args` are the kernel's first parameters, `meta` the constants
    that follow, and options.

    Two launches of a kernel with equal keys must be ones for which Triton would take the same
    compiled kernel: the key holds `place` of every tensor that is not a whole allocation, every
    number that is specialised on, and whatever of `meta` can differ.
    """
    at = (id(kernel), key)
    made = _made.get(at)
    if made is None:
        compiled = kernel[grid](*args, **meta)
        if hasattr(compiled, "packed_metadata"):  # Triton's interpreter compiles nothing
            constants = tuple(meta[name] for name in kernel.arg_names[len(args) :])
            _made[at] = compiled, constants
        return
    compiled, constants = made
    compiled[grid](*args, *constants)
