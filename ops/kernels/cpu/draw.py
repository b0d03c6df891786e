"""The seeded draw and the most likely tokens, compiled: plain functions on torch CPU tensors.

Same token ids as `ops.sampling.draw_rows`, on every instruction set; rows are shared out over
threads.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ops.kernels.cpu.native import DTYPES

if TYPE_CHECKING:
    from ops.sampling import Rows

_P, _L = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "sb_draw": ([_P, ctypes.c_int, _L, _L, _L, *[_P] * 8], None),
    "sb_top": ([_P, _L, _L, _L, _L, _P, _P, _P, _P], None),
    "sb_draw_steps": ([_P, _P, _L, _P, _P, _P], None),
    "sb_draw_sweep_words": ([ctypes.c_uint64, ctypes.c_uint64], _L),
    "sb_draw_sweep_mass": ([], _L),
}


class Draw:
    """The draw of one compiled library."""

    def __init__(self, library: Path) -> None:
        self.c = ctypes.CDLL(str(library))
        for symbol, (arguments, result) in _SIGNATURES.items():
            function = getattr(self.c, symbol)
            function.argtypes, function.restype = arguments, result

    def draw(self, logits: torch.Tensor, opts: Rows) -> torch.Tensor:
        """float32, bfloat16 or float16 [N, V] on the CPU, not changed -> int64 [N].

        `opts` as made by `ops.sampling.rows`.
        """
        x = _rows(logits, *DTYPES)
        out = torch.empty(x.shape[0], dtype=torch.int64)
        columns = (
            opts.inv_t, opts.top_k, opts.top_p, opts.min_p, opts.seed, opts.choice, opts.position,
        )  # fmt: skip
        held = [np.ascontiguousarray(c) for c in columns]
        if any(c.shape != (x.shape[0],) for c in held):
            raise ValueError("draw: every option needs one value a row")
        pointers = [c.ctypes.data for c in held]
        self.c.sb_draw(
            x.data_ptr(), DTYPES[x.dtype], x.stride(0), *x.shape, *pointers, out.data_ptr()
        )
        return out

    def top(
        self, logprobs: torch.Tensor, k: int, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `ops.sampling_logprobs.gather`: (ids int32 [N, k + 1], values [N, k + 1], rank
        [N]).
        """
        x, at = _rows(logprobs), token_ids.to(torch.int64).contiguous()
        n, vocab = x.shape
        k = min(k, vocab)
        if at.numel() and not (0 <= int(at.min()) and int(at.max()) < vocab):
            raise IndexError(f"token ids must lie in 0..{vocab - 1}")
        ids = torch.empty((n, k + 1), dtype=torch.int32)
        values = torch.empty((n, k + 1), dtype=torch.float32)
        rank = torch.empty(n, dtype=torch.int64)
        self.c.sb_top(
            x.data_ptr(), x.stride(0), n, vocab, k, at.data_ptr(), ids.data_ptr(),
            values.data_ptr(), rank.data_ptr(),
        )  # fmt: skip
        return ids, values, rank

    def steps(
        self, words: torch.Tensor, t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For tests: (noise, its bound, mass) of words (int64) and t (float32), each [n], n a
        multiple of 16.
        """
        w, n = words.to(torch.uint32), words.numel()
        noise, bound = torch.empty(n), torch.empty(n)
        mass = torch.empty(n, dtype=torch.int32)
        self.c.sb_draw_steps(
            w.data_ptr(), t.data_ptr(), n, noise.data_ptr(), bound.data_ptr(), mass.data_ptr()
        )
        return noise, bound, mass


def _rows(x: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    if x.dim() != 2 or x.dtype not in (dtypes or (torch.float32,)) or x.device.type != "cpu":
        raise TypeError(f"draw: needs float32 [N, V] on the CPU, not {x.dtype} {tuple(x.shape)}")
    return x if x.stride(1) == 1 else x.contiguous()


@functools.cache
def load(isa: str | None = None) -> Draw | None:
    """The compiled draw, None where the CPU kernels are the PyTorch ones.

    `isa` as in `ops.kernels.cpu.load`.
    """
    from ops.kernels import cpu

    kernels = cpu.load(isa)
    return Draw(kernels.library) if kernels.name.startswith("native") else None
