"""cuBLASLt with the algorithm pinned by the caller: no heuristic runs when rows of a batch change.

Only unsplit algorithms are offered: no workspace, no reduction scheme, split-K 1. Each output
element is then one accumulator fed in ascending k. That this equals `triton.linear` with split 1
bit for bit is not assumed: whoever plans a product compares the bits first (`ops.kernels.dense`).
Enum values are those of cublasLt.h 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_COMPUTE_32F, _R_32F = 68, 0
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_OP_T = 1
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 7, 8
_EPILOGUE_BIAS = 4
_PREF_WORKSPACE, _PREF_REDUCTION = 1, 3
_ALGO = {"id": 0, "tile": 1, "split_k": 2, "reduction": 3, "swizzle": 4, "custom": 5,
         "stages": 6, "inner": 7, "cluster": 8}  # fmt: skip


class CublasLtError(RuntimeError):
    """The library is missing, or refused a call; the message names the call and its status."""


class _Algo(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Found(ctypes.Structure):
    _fields_ = [
        ("algo", _Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class Algorithm:
    """A pinned algorithm and what the library says it is."""

    raw: bytes
    config: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return "cublaslt(" + " ".join(f"{k}={v}" for k, v in self.config) + ")"


@cache
def _library() -> ctypes.CDLL:
    torch.cuda.current_blas_handle()  # loads the library and makes the context
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as fault:
        raise CublasLtError(f"libcublasLt.so.{major} does not load: {fault}") from fault


def _call(name: str, *args: Any) -> None:
    status = getattr(_library(), name)(*args)
    if status != 0:
        raise CublasLtError(f"{name} answered status {status}")


@cache
def _handle(_device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _set(name: str, target: ctypes.c_void_p, key: int, value: Any) -> None:
    _call(name, target, key, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _desc(bias: int | None) -> ctypes.c_void_p:
    desc = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(desc), _COMPUTE_32F, _R_32F)
    _set("cublasLtMatmulDescSetAttribute", desc, _DESC_TRANSA, ctypes.c_int32(_OP_T))
    if bias is not None:
        _set("cublasLtMatmulDescSetAttribute", desc, _DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
        _set("cublasLtMatmulDescSetAttribute", desc, _DESC_BIAS_POINTER, ctypes.c_void_p(bias))
    return desc


@cache
def _plain_desc() -> ctypes.c_void_p:
    return _desc(None)


@cache
def _layout(dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    """A column-major layout; kept for good (a few per shape, some dozens of bytes each)."""
    layout = ctypes.c_void_p()
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[dtype],
          ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride))  # fmt: skip
    return layout


def algorithms(
    rows: int, columns: int, depth: int, dtype: torch.dtype, most: int
) -> list[Algorithm]:
    """Unsplit algorithms for [rows, depth] · [columns, depth]ᵀ, the library's favourite first."""
    preference = ctypes.c_void_p()
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    setter = "cublasLtMatmulPreferenceSetAttribute"
    _set(setter, preference, _PREF_WORKSPACE, ctypes.c_uint64(0))
    _set(setter, preference, _PREF_REDUCTION, ctypes.c_uint32(0))
    found = (_Found * most)()
    count = ctypes.c_int()
    a, b = _layout(dtype, depth, columns, depth), _layout(dtype, depth, rows, depth)
    c = _layout(dtype, columns, rows, columns)
    _call("cublasLtMatmulAlgoGetHeuristic", _handle(torch.cuda.current_device()), _plain_desc(),
          a, b, c, c, preference, most, found, ctypes.byref(count))  # fmt: skip
    _call("cublasLtMatmulPreferenceDestroy", preference)
    listed = [_describe(f.algo) for f in found[: count.value] if f.state == 0]
    configs = [dict(a.config) for a in listed]
    unsplit = [c["split_k"] <= 1 and c["reduction"] == 0 for c in configs]
    return [a for a, whole in zip(listed, unsplit, strict=True) if whole]


def _describe(algo: _Algo) -> Algorithm:
    config = []
    for name, key in _ALGO.items():
        value, written = ctypes.c_uint32(), ctypes.c_size_t()
        size = 2 if name in ("inner", "cluster") else 4
        _call("cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(algo), key, ctypes.byref(value),
              ctypes.c_size_t(size), ctypes.byref(written))  # fmt: skip
        config.append((name, value.value))
    return Algorithm(bytes(algo), tuple(config))


def product(
    algorithm: Algorithm, columns: int, depth: int, dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """(x [M, depth], weight [columns, depth], bias or None) → [M, columns], for any M.

    Raises `CublasLtError` when the library refuses (a row stride or pointer it cannot take).
    """
    algo = _Algo.from_buffer_copy(algorithm.raw)
    by_algo, one, zero = ctypes.byref(algo), ctypes.c_float(1), ctypes.c_float(0)
    by_one, by_zero = ctypes.byref(one), ctypes.byref(zero)
    nothing, no_size = ctypes.c_void_p(0), ctypes.c_size_t(0)
    matmul = _library().cublasLtMatmul
    descs: dict[int, ctypes.c_void_p] = {}
    pointer = ctypes.c_void_p

    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = x.shape[0]
        y = torch.empty((rows, columns), dtype=dtype, device=x.device)
        if bias is None:
            desc = _plain_desc()
        else:
            at = bias.data_ptr()
            desc = descs.get(at) or descs.setdefault(at, _desc(at))
        out = pointer(y.data_ptr())
        c = _layout(dtype, columns, rows, columns)
        status = matmul(
            _handle(x.device.index), desc, by_one,
            pointer(weight.data_ptr()), _layout(dtype, depth, columns, weight.stride(0)),
            pointer(x.data_ptr()), _layout(dtype, depth, rows, x.stride(0) if rows > 1 else depth),
            by_zero, out, c, out, c, by_algo, nothing, no_size,
            pointer(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip
        if status != 0:
            shape = f"M={rows} N={columns} K={depth}"
            raise CublasLtError(f"cublasLtMatmul {shape} {algorithm} answered status {status}")
        return y

    return run
