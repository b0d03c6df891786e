"""Rows that look alike to the compiler.

Triton compiles a kernel anew for pointers and strides that are or are not multiples of 16, and a
different layout of lanes adds a row up in another order. So a kernel that adds along a row gets its
strides unspecialised, with a promise of alignment that follows from the row's width alone.
"""

from __future__ import annotations

import torch


def alignment(columns: int) -> int:
    """What every row stride of a row of this width must be a multiple of, in elements."""
    return 16 if columns % 16 == 0 else 1


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy of it where its strides or its first byte are not so aligned."""
    step = alignment(x.shape[-1])
    fits = x.stride(-1) == 1 or x.shape[-1] == 1
    if fits and x.data_ptr() % 16 == 0 and all(s % step == 0 for s in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)
