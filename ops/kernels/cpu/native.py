"""The C++ kernels behind plain Python functions on torch CPU tensors.

Each call checks little (a wrong dtype or shape raises `TypeError` or `ValueError`), allocates its
output, and hands pointers to C. What every function promises, and tests assert: the bits of one row
depend on that row alone, not on the number of rows, the row's place, the thread count or the
instruction set.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ABI = 2
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTS = {
    "silu": 0,
    "swish": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "gelu_new": 2,
    "gelu_fast": 2,
    "gelu_pytorch_tanh": 2,
    "relu": 3,
    "quick_gelu": 4,
    "sigmoid": 5,
    "tanh": 6,
    "relu2": 7,
    "none": 8,
}

# The numbers that fix an order of accumulation, for the fingerprint. The same on every instruction
# set.
TILES: dict[str, dict[str, int | str]] = {
    "linear": {"k": "ascending", "step": "fma", "split_k": 1, "bf16_denormals": "zero"},
    "moe": {"k": "ascending", "step": "fma", "split_k": 1, "slots": "ascending"},
    "attention": {"keys_per_block": 64, "keys_per_split": 256, "lanes": 16},
    "rows": {"lanes": 16, "tree": "8-4-2-1"},
}

_P, _L, _I, _F = c_void_p, c_int64, c_int, c_float
_SIGNATURES: dict[str, list[Any]] = {
    "sb_runtime": [_P, _P, _I],
    "sb_threads": [_I],
    "sb_pack": [_P, _L, _P, _I, _L, _L],
    "sb_take_rows": [_P, _P, _L, _P],
    "sb_linear": [_P, _P, _I, _L, _L, _P, _I, _P],
    "sb_rms_norm": [_P, _I, _L, _L, _L, _L, _L, _P, _I, _F, _F, _P],
    "sb_add_rms_norm": [_P, _P, _I, _L, _L, _L, _L, _P, _I, _F, _F, _P, _P],
    "sb_layer_norm": [_P, _I, _L, _L, _L, _P, _P, _I, _F, _P],
    "sb_softmax": [_P, _I, _L, _L, _L, _I, _P],
    "sb_sum": [_P, _I, _L, _L, _L, _F, _P],
    "sb_act": [_P, _I, _L, _L, _L, _I, _I, _P],
    "sb_cache_write": [_P, _P, _I, _L, _L, _P, _L, _L, _P, _L, _L, _L, _L],
    "sb_attention": [ctypes.c_char_p],
    "sb_moe": [ctypes.c_char_p],
    "sb_burn_fma": [_L, _P],
    "sb_read_all": [_P, _L, _P],
    "sb_layer": [ctypes.c_char_p, ctypes.c_char_p],
    "sb_rotary": [_P, _L, _P, _L, _L, _P, _L, _L, _I, _P, _I, _L, _L, _I],
}


class _Weight(ctypes.Structure):
    _fields_ = [("w", c_void_p), ("n", c_int64), ("k", c_int64), ("dt", c_int32)]


# The structs of attention.h and moe.h, field by field in native layout: packing bytes costs a tenth
# of a ctypes struct.
_ATTENTION = struct.Struct("@PqPqqiPqPPqqqqqffqiPPP")
_MOE = struct.Struct("@PPqPiqqqPPqiiP")
_LAYER = struct.Struct("@PPPPPPPPPPPPiiffqqqqPiiiiffqPP")
_STEP = struct.Struct("@PPPPiqqPPqPqqqPqPPq")


class Packed:
    """A weight [n, k] in panels of sixteen rows. `data` is the flat tensor of n*k numbers that
    holds them.
    """

    __slots__ = ("_struct", "address", "data", "dtype", "k", "n")

    def __init__(self, n: int, k: int, data: Tensor) -> None:
        self.n, self.k, self.dtype, self.data = n, k, data.dtype, data
        self._struct = _Weight(data.data_ptr(), n, k, DTYPES[data.dtype])
        self.address = ctypes.addressof(self._struct)


class MoeTable(list[Packed]):
    """One packed weight per expert, all of one shape, with the table of addresses that C reads."""

    def __init__(self, experts: Sequence[Packed]) -> None:
        super().__init__(experts)
        self.n, self.k = self[0].n, self[0].k
        if any((e.n, e.k, e.dtype) != (self.n, self.k, self[0].dtype) for e in self):
            raise ValueError("moe: every expert must have the same shape and dtype")
        self._array = (c_void_p * len(self))(*(e.address for e in self))
        self.address = ctypes.addressof(self._array)


class LayerPlan:
    """What one decoder layer needs besides its input, checked once. Made by `Native.layer_plan`."""

    __slots__ = ("dtype", "head_size", "hidden", "kept", "kv_heads", "packed")

    def __init__(
        self,
        packed: bytes,
        dtype: torch.dtype,
        hidden: int,
        kv_heads: int,
        head_size: int,
        kept: object,
    ) -> None:
        self.packed, self.dtype, self.hidden = packed, dtype, hidden
        self.kv_heads, self.head_size, self.kept = kv_heads, head_size, kept


def _openmp() -> tuple[Any, Any] | None:
    """GOMP_parallel and omp_get_thread_num of the runtime that torch uses; None if not found."""
    folder = Path(torch.__file__).parent
    libraries = [*folder.glob("lib/lib*omp*.so*"), *folder.parent.glob("torch.libs/lib*omp*.so*")]
    for path in libraries:
        try:
            lib = ctypes.CDLL(str(path))
            found = (lib.GOMP_parallel, lib.omp_get_thread_num)
        except (OSError, AttributeError):
            continue
        return found
    return None


class Native:
    """The functions of one compiled library. `name` says which; `reason` says why this one runs."""

    def __init__(self, library: Path, isa: str, reason: str, threads: int | None = None) -> None:
        self.name, self.reason, self.library = f"native-{isa}", reason, library
        self.tiles = TILES
        self._c = lib = ctypes.CDLL(str(library))
        if lib.sb_abi() != ABI:
            raise RuntimeError(f"the compiled kernels speak interface {lib.sb_abi()}, not {ABI}")
        for symbol, kinds in _SIGNATURES.items():
            function = getattr(lib, symbol)
            function.argtypes, function.restype = kinds, None
        runtime = _openmp()
        self.threads = threads or torch.get_num_threads()
        entries = [ctypes.cast(f, c_void_p) for f in runtime] if runtime else [None, None]
        lib.sb_runtime(*entries, self.threads)
        self.dot = bool(lib.sb_dot(1))
        self._linear, self._rms, self._add_rms = lib.sb_linear, lib.sb_rms_norm, lib.sb_add_rms_norm
        self._act, self._rotary = lib.sb_act, lib.sb_rotary
        self._layer = lib.sb_layer
        self._attention, self._cache_write = lib.sb_attention, lib.sb_cache_write

    def set_threads(self, threads: int) -> None:
        """How many threads a call may use. Changes speed, never bits."""
        self.threads = max(1, threads)
        self._c.sb_threads(self.threads)

    def set_dot(self, on: bool) -> bool:
        """Lets bf16 products use the CPU's dot product instruction where it was seen to be two
        FMAs, bit for bit. Changes speed, never bits. Returns whether it is used."""
        self.dot = bool(self._c.sb_dot(int(on)))
        return self.dot

    def burn_fma(self, iterations: int) -> float:
        """Does nothing but fused multiply-adds on every thread; returns how many flops it did. A
        bench's yardstick.
        """
        out = torch.empty(1024, dtype=torch.float32)
        self._c.sb_burn_fma(iterations, out.data_ptr())
        return iterations * 16 * 16 * 2.0 * self.threads

    def read_all(self, x: Tensor) -> None:
        """Reads a contiguous fp32 tensor once, on every thread. A bench's yardstick for memory."""
        out = torch.empty(1024, dtype=torch.float32)
        self._c.sb_read_all(x.data_ptr(), x.numel(), out.data_ptr())

    # -- linear ------------------------------------------------------------------------------------
    def pack_weight(self, weight: Tensor, inplace: bool = True) -> Packed:
        """[n, k] -> `Packed`. In place (the default) a contiguous weight's own memory is
        rearranged: the tensor passed in then holds panels, not rows, and must not be read as a
        weight again. Otherwise a copy is packed."""
        n, k = weight.shape
        dt = DTYPES[weight.dtype]
        weight = weight.detach()
        reuse = inplace and weight.is_contiguous()
        source = weight if weight.stride(1) == 1 else weight.contiguous()
        data = weight.view(-1) if reuse else torch.empty(n * k, dtype=weight.dtype)
        self._c.sb_pack(source.data_ptr(), source.stride(0), data.data_ptr(), dt, n, k)
        return Packed(n, k, data)

    def take_rows(self, packed: Packed, ids: Tensor) -> Tensor:
        """Rows `ids` (any shape, integer) of the packed weight, as an embedding lookup:
        [*ids.shape, k].
        """
        flat = ids.reshape(-1).to(torch.int64)
        if flat.numel() and not (0 <= int(flat.min()) and int(flat.max()) < packed.n):
            raise IndexError(f"row ids must lie in 0..{packed.n - 1}")
        out = torch.empty((*ids.shape, packed.k), dtype=packed.dtype)
        self._c.sb_take_rows(packed.address, flat.data_ptr(), flat.numel(), out.data_ptr())
        return out

    def linear(self, x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
        """x[..., k] @ w.T (+ bias) -> [..., n] in x's type. fp32 accumulator, k ascending, one FMA
        each, then the bias.
        """
        k = packed.k
        if x.dim() == 2:
            if x.stride(1) != 1:
                x = x.contiguous()
            m, width = x.shape
            ldx = x.stride(0)
            out = torch.empty((m, packed.n), dtype=x.dtype)
        else:
            x = x.contiguous()
            width = x.shape[-1]
            m, ldx = x.numel() // max(width, 1), width
            out = torch.empty((*x.shape[:-1], packed.n), dtype=x.dtype)
        if width != k:
            raise ValueError(f"linear: input has {width} columns, the weight {k}")
        if m == 0:
            return out
        if bias is None:
            self._linear(
                packed.address, x.data_ptr(), DTYPES[x.dtype], ldx, m, None, 0, out.data_ptr()
            )
        else:
            self._linear(
                packed.address,
                x.data_ptr(),
                DTYPES[x.dtype],
                ldx,
                m,
                bias.data_ptr(),
                DTYPES[bias.dtype],
                out.data_ptr(),
            )
        return out

    def moe(
        self,
        x: Tensor,
        w13: Sequence[Packed],
        w2: Sequence[Packed],
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: str,
    ) -> Tensor:
        """Sum over slots, in slot order, of weight * expert(x): x[M, H], topk_*[M, k] -> [M, H].

        w13[e]: [2I, H] (gated) or [I, H]; w2[e]: [H, I]. Roundings and order are told in moe.h. A
        negative id takes no part. Pass `MoeTable`s to save time.
        """
        m, h = x.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        up, down = (w if isinstance(w, MoeTable) else MoeTable(w) for w in (w13, w2))
        if up.k != h or down.n != h or up.n not in (down.k, 2 * down.k) or len(up) != len(down):
            raise ValueError(
                f"moe: input of {h} columns, w13 [{up.n}, {up.k}], w2 [{down.n}, {down.k}]"
            )
        out = torch.empty((m, h), dtype=x.dtype)
        if not m:
            return out
        weights = topk_weights.to(torch.float32).contiguous()
        ids = topk_ids.to(torch.int32).contiguous()
        call = _MOE.pack(
            up.address,
            down.address,
            len(up),
            x.data_ptr(),
            DTYPES[x.dtype],
            x.stride(0),
            m,
            h,
            weights.data_ptr(),
            ids.data_ptr(),
            ids.shape[1],
            ACTS[activation],
            int(up.n == 2 * down.k),
            out.data_ptr(),
        )
        self._c.sb_moe(call)
        return out

    # -- rows --------------------------------------------------------------------------------------
    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
    ) -> Tensor:
        """x / sqrt(mean(x²) + eps) * (weight + offset) over the last dimension; fp32 inside, one
        rounding.

        x: [H], [M, H] or [M, N, H] with any outer strides. Gemma's variant: weight_offset=1.0.
        """
        dims = x.dim()
        if dims > 3 or x.stride(-1) != 1:
            x = x.contiguous()
        h = x.shape[-1]
        if dims == 2:
            m, inner, outer_stride, inner_stride = x.shape[0], 1, x.stride(0), 0
        elif dims == 3:
            m, inner, outer_stride, inner_stride = (
                x.shape[0] * x.shape[1],
                x.shape[1],
                x.stride(0),
                x.stride(1),
            )
        else:
            m, inner, outer_stride, inner_stride = x.numel() // max(h, 1), 1, h, 0
        out = torch.empty(x.shape, dtype=x.dtype)
        pointer, wdt = (None, 0) if weight is None else (weight.data_ptr(), DTYPES[weight.dtype])
        if m:
            self._rms(
                x.data_ptr(),
                DTYPES[x.dtype],
                m,
                h,
                inner,
                outer_stride,
                inner_stride,
                pointer,
                wdt,
                weight_offset,
                eps,
                out.data_ptr(),
            )
        return out

    def fused_add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        weight_offset: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """s = x + residual, rounded to their type; returns (rms_norm(s), s). Equal to the two steps
        apart.
        """
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.reshape(-1, x.shape[-1]).contiguous()
        if residual.dim() != 2 or residual.stride(1) != 1:
            residual = residual.reshape(-1, residual.shape[-1]).contiguous()
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(
                f"fused_add_rms_norm: {x.dtype}{[*x.shape]} and {residual.dtype}{[*residual.shape]}"
            )
        m, h = x.shape
        out, total = torch.empty((m, h), dtype=x.dtype), torch.empty((m, h), dtype=x.dtype)
        pointer, wdt = (None, 0) if weight is None else (weight.data_ptr(), DTYPES[weight.dtype])
        if m:
            self._add_rms(
                x.data_ptr(),
                residual.data_ptr(),
                DTYPES[x.dtype],
                m,
                h,
                x.stride(0),
                residual.stride(0),
                pointer,
                wdt,
                weight_offset,
                eps,
                out.data_ptr(),
                total.data_ptr(),
            )
        return out, total

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension; two passes, fp32,
        one rounding.
        """
        flat = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        if weight is not None and bias is not None and weight.dtype != bias.dtype:
            raise TypeError("layer_norm: weight and bias must have one dtype")
        some = weight if weight is not None else bias
        wdt = DTYPES[some.dtype] if some is not None else 0
        m, h = flat.shape
        self._c.sb_layer_norm(
            flat.data_ptr(),
            DTYPES[x.dtype],
            m,
            h,
            flat.stride(0),
            _ptr(weight),
            _ptr(bias),
            wdt,
            eps,
            out.data_ptr(),
        )
        return out

    def softmax(self, x: Tensor) -> Tensor:
        """softmax over the last dimension -> fp32."""
        return self._softmax(x, 0)

    def log_softmax(self, x: Tensor) -> Tensor:
        """log-softmax over the last dimension -> fp32: (x - max) - log(sum of exp(x - max))."""
        return self._softmax(x, 1)

    def _softmax(self, x: Tensor, log: int) -> Tensor:
        flat = _rows(x)
        out = torch.empty(x.shape, dtype=torch.float32)
        m, v = flat.shape
        self._c.sb_softmax(
            flat.data_ptr(), DTYPES[x.dtype], m, v, flat.stride(0), log, out.data_ptr()
        )
        return out

    def sum(self, x: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
        """Sum over one dimension in fp32: sixteen striped lanes, then the fixed tree; one rounding
        to x's type.
        """
        return self._sum(x, dim, keepdim, mean=False)

    def mean(self, x: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
        """`sum`, divided in fp32 by the count before the rounding."""
        return self._sum(x, dim, keepdim, mean=True)

    def _sum(self, x: Tensor, dim: int, keepdim: bool, mean: bool) -> Tensor:
        moved = x.movedim(dim, -1)
        flat = _rows(moved)
        m, h = flat.shape
        out = torch.empty(moved.shape[:-1], dtype=torch.float32)
        self._c.sb_sum(
            flat.data_ptr(),
            DTYPES[x.dtype],
            m,
            h,
            flat.stride(0),
            float(h) if mean else 1.0,
            out.data_ptr(),
        )
        out = out.to(x.dtype)
        return out.unsqueeze(dim) if keepdim else out

    # -- elementwise -------------------------------------------------------------------------------
    def act_and_mul(self, x: Tensor, kind: str) -> Tensor:
        """[..., 2H] -> [..., H]: act(first half) * second half, in fp32, one rounding."""
        return self._activate(x, kind, x.shape[-1] // 2, 1)

    def act(self, x: Tensor, kind: str) -> Tensor:
        """act(x), in fp32, one rounding. Kinds: the keys of `ACTS`."""
        return self._activate(x, kind, x.shape[-1], 0)

    def _activate(self, x: Tensor, kind: str, h: int, gated: int) -> Tensor:
        flat = x if x.dim() == 2 and x.stride(1) == 1 else _rows(x)
        out = torch.empty((*x.shape[:-1], h), dtype=x.dtype)
        self._act(
            flat.data_ptr(),
            DTYPES[x.dtype],
            flat.shape[0],
            h,
            flat.stride(0),
            ACTS[kind],
            gated,
            out.data_ptr(),
        )
        return out

    def rotary(
        self,
        positions: Tensor,
        q: Tensor,
        k: Tensor | None,
        cos_sin_cache: Tensor,
        head_size: int,
        rotary_dim: int,
        is_neox: bool = True,
    ) -> None:
        """Rotates q[T, Hq*D] and k[T, Hk*D] in place. `cos_sin_cache`: [positions, rotary_dim], cos
        then sin.
        """
        if q.stride(-1) != 1 or (k is not None and (k.stride(-1) != 1 or k.dtype != q.dtype)):
            raise ValueError("rotary: q and k need a contiguous last dimension and one dtype")
        positions = positions if positions.dtype == torch.int64 else positions.to(torch.int64)
        tokens = positions.numel()
        k_ptr, k_stride, k_heads = None, 0, 0
        if k is not None:
            k_ptr, k_stride, k_heads = (
                k.data_ptr(),
                k.stride(0),
                k[0].numel() // head_size if tokens else 0,
            )
        q_heads = q[0].numel() // head_size if tokens else 0
        self._rotary(
            positions.data_ptr(),
            tokens,
            q.data_ptr(),
            q.stride(0),
            q_heads,
            k_ptr,
            k_stride,
            k_heads,
            DTYPES[q.dtype],
            cos_sin_cache.data_ptr(),
            DTYPES[cos_sin_cache.dtype],
            head_size,
            rotary_dim,
            int(is_neox),
        )

    # -- attention ---------------------------------------------------------------------------------
    def reshape_and_cache(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes key and value [T, Hk, D] to their slots (block * block_size + offset; negative:
        skipped).

        kv_cache: [blocks, Hk, block_size, 2*D], block_size and D multiples of 16, the last two
        dimensions contiguous; what lies inside is ours: keys in tiles of sixteen, then values.
        """
        block_size, d = _cache_shape(kv_cache)
        tokens = slot_mapping.numel()
        if not tokens:
            return
        if key.dtype != kv_cache.dtype or value.dtype != kv_cache.dtype:
            raise TypeError(f"reshape_and_cache: {key.dtype} keys for a {kv_cache.dtype} cache")
        key, value = _head_rows(key), _head_rows(value)
        slots = slot_mapping if slot_mapping.dtype == torch.int64 else slot_mapping.to(torch.int64)
        self._cache_write(
            key.data_ptr(),
            value.data_ptr(),
            DTYPES[key.dtype],
            key.stride(0),
            value.stride(0),
            kv_cache.data_ptr(),
            kv_cache.stride(0),
            kv_cache.stride(1),
            slots.data_ptr(),
            tokens,
            kv_cache.shape[1],
            d,
            block_size,
        )

    def attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        causal: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of q[T, Hq, D] over the paged cache -> [T, Hq, D]. The order is told in
        attention.h.

        block_table[S, B], query_start_loc[S+1], seq_lens[S]: int32; the queries are the last tokens
        of their sequence, whose keys are already in the cache. window: keys that a query sees,
        itself included (0: all).
        """
        block_size, d = _cache_shape(kv_cache)
        if q.dtype != kv_cache.dtype or q.shape[-1] != d or q.dim() != 3:
            raise TypeError(
                f"attention: q {q.dtype}{[*q.shape]} for a {kv_cache.dtype} cache of head size {d}"
            )
        q = _head_rows(q)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype)
        elif not out.is_contiguous():
            raise ValueError("attention: out must be contiguous")
        block_table, query_start_loc, seq_lens = (
            _i32(block_table),
            _i32(query_start_loc),
            _i32(seq_lens),
        )
        slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        call = _ATTENTION.pack(
            q.data_ptr(),
            q.stride(0),
            kv_cache.data_ptr(),
            kv_cache.stride(0),
            kv_cache.stride(1),
            DTYPES[q.dtype],
            block_table.data_ptr(),
            block_table.stride(0),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            seq_lens.numel(),
            q.shape[1],
            kv_cache.shape[1],
            d,
            block_size,
            scale,
            softcap,
            window,
            int(causal),
            _ptr(slopes) or 0,
            _ptr(sinks) or 0,
            out.data_ptr(),
        )
        self._attention(call)
        return out

    # -- a whole decoder layer ---------------------------------------------------------------------
    def layer_plan(
        self,
        *,
        qkv: Packed,
        o: Packed,
        gate_up: Packed,
        down: Packed,
        input_norm: Tensor,
        post_norm: Tensor,
        eps: float,
        q_heads: int,
        kv_heads: int,
        head_size: int,
        scale: float,
        activation: str,
        qkv_bias: Tensor | None = None,
        o_bias: Tensor | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_offset: float = 0.0,
        cos_sin_cache: Tensor | None = None,
        rotary_dim: int = 0,
        is_neox: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> LayerPlan:
        """Checks and keeps everything about one pre-norm decoder layer (Llama, Qwen2, Qwen3) for
        `decoder_layer`.

        gate_up: [2I, H] (gated) or [I, H]. q_norm, k_norm: [head_size], both or none. The tensors
        must stay alive and in place; the plan holds references. Raises `ValueError` on shapes or
        dtypes that do not fit together.
        """
        hidden, mid = qkv.k, down.k
        biases = [qkv_bias, o_bias, gate_up_bias, down_bias]
        norms = [input_norm, post_norm, q_norm, k_norm]
        shapes = {
            "qkv": (qkv.n, (q_heads + 2 * kv_heads) * head_size),
            "o": ((o.n, o.k), (hidden, q_heads * head_size)),
            "gate_up": ((gate_up.n in (mid, 2 * mid), gate_up.k), (True, hidden)),
            "down": (down.n, hidden),
            "norms": ((q_norm is None), (k_norm is None)),
            "bias dtypes": (len({b.dtype for b in biases if b is not None}) <= 1, True),
            "norm dtypes": (len({w.dtype for w in norms if w is not None}), 1),
        }
        for name, (got, wanted) in shapes.items():
            if got != wanted:
                raise ValueError(f"layer_plan: {name}: {got}, wanted {wanted}")
        slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        tensors = [*biases, *norms, cos_sin_cache, slopes, sinks]
        if any(t is not None and not t.is_contiguous() for t in tensors):
            raise ValueError("layer_plan: every tensor must be contiguous")
        bias_dt = next((DTYPES[b.dtype] for b in biases if b is not None), 0)
        packed = _LAYER.pack(
            qkv.address,
            o.address,
            gate_up.address,
            down.address,
            *(_ptr(t) or 0 for t in biases + norms),
            bias_dt,
            DTYPES[input_norm.dtype],
            eps,
            norm_offset,
            q_heads,
            kv_heads,
            head_size,
            rotary_dim,
            _ptr(cos_sin_cache) or 0,
            0 if cos_sin_cache is None else DTYPES[cos_sin_cache.dtype],
            int(is_neox),
            ACTS[activation],
            int(gate_up.n == 2 * mid),
            scale,
            softcap,
            window,
            _ptr(slopes) or 0,
            _ptr(sinks) or 0,
        )
        return LayerPlan(
            packed, qkv.dtype, hidden, kv_heads, head_size, (qkv, o, gate_up, down, tensors)
        )

    def decoder_layer(
        self,
        plan: LayerPlan,
        hidden: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        slot_mapping: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """hidden[M, H], residual[M, H] or None -> (hidden, residual): one call in place of ten, and
        the same bits.

        Equal to: (add and) rms_norm, linear, rms_norm of heads, rotary, reshape_and_cache,
        attention, linear, fused add and rms_norm, linear, act_and_mul, linear. Rows beyond
        slot_mapping's length are padding.
        """
        m, h = hidden.shape
        block_size, d = _cache_shape(kv_cache)
        fits = hidden.dtype == kv_cache.dtype and h == plan.hidden and d == plan.head_size
        if not fits or kv_cache.shape[1] != plan.kv_heads or slot_mapping.numel() > m:
            raise ValueError(
                f"decoder_layer: {hidden.dtype}{[*hidden.shape]} and cache {[*kv_cache.shape]}"
            )
        if not hidden.is_contiguous():
            hidden = hidden.contiguous()
        if residual is not None and not residual.is_contiguous():
            residual = residual.contiguous()
        out, total = torch.empty_like(hidden), torch.empty_like(hidden)
        positions = positions if positions.dtype == torch.int64 else positions.to(torch.int64)
        slots = slot_mapping if slot_mapping.dtype == torch.int64 else slot_mapping.to(torch.int64)
        block_table, query_start_loc, seq_lens = (
            _i32(block_table),
            _i32(query_start_loc),
            _i32(seq_lens),
        )
        step = _STEP.pack(
            hidden.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            DTYPES[hidden.dtype],
            m,
            h,
            positions.data_ptr(),
            slots.data_ptr(),
            slots.numel(),
            kv_cache.data_ptr(),
            kv_cache.stride(0),
            kv_cache.stride(1),
            block_size,
            block_table.data_ptr(),
            block_table.stride(0),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            seq_lens.numel(),
        )
        if m:
            self._layer(plan.packed, step)
        return out, total


def _cache_shape(kv_cache: Tensor) -> tuple[int, int]:
    """(block_size, head size) of a cache that the kernels can use; raises `ValueError`."""
    _, _, block_size, double = kv_cache.shape
    d = double // 2
    if block_size % 16 or d % 16 or kv_cache.stride(3) != 1 or kv_cache.stride(2) != double:
        raise ValueError(
            f"kv cache {[*kv_cache.shape]}: block size and head size must be multiples of 16, "
            "and [block, 2*D] contiguous"
        )
    return block_size, d


def _head_rows(x: Tensor) -> Tensor:
    """[T, H, D] with the heads of a token side by side; any stride between tokens."""
    if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1):
        return x
    return x.contiguous()


def _i32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int32 and x.stride(-1) == 1 else x.to(torch.int32).contiguous()


def _rows(x: Tensor) -> Tensor:
    """x as [M, H] with a contiguous last dimension."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()


def _ptr(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
