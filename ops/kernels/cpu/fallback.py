"""The CPU kernels in plain PyTorch: slower than the native ones, equally invariant, same
signatures.

Only operations whose result is exactly rounded element by element (add, subtract, multiply, divide,
square root, comparison, conversion, gather) touch the data. Such an operation gives the same bits
in torch's vectorised main loop and in its scalar tail, on any thread and at any position. Every sum
over an axis is a balanced tree over a fixed shape (`_tree`), so that no torch reduction, no BLAS
and no vendor library decides an order. Exponentials are a polynomial in multiply and add; torch's
own `exp` differs between its vector loop and its tail.

The bits are this module's own: they differ from the native kernel's, which fuses multiply and add.
The name goes into the fingerprint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

KEYS_PER_TILE = 16  # keys per partial sum in attention, aligned to the absolute position
_ELEMENTS = 1 << 22  # largest temporary of a product, in elements: bounds memory, never the order

_LOG2E = 1.4426950408889634
_LN2_HI = 0.693359375
_LN2_LO = -2.12194440e-4


@dataclass(frozen=True)
class Packed:
    """A weight [n, k] ready for `linear`. Here `data` is the weight itself: one copy, row-major."""

    n: int
    k: int
    dtype: torch.dtype
    data: Tensor


def pack_weight(weight: Tensor, inplace: bool = True) -> Packed:
    """[n, k] -> Packed on the same storage (a strided weight is copied once). `inplace` False
    copies it.
    """
    if weight.ndim != 2:
        raise ValueError(f"pack_weight: expected [n, k], got {tuple(weight.shape)}")
    data = (
        weight.detach().contiguous()
        if inplace
        else weight.detach().clone(memory_format=torch.contiguous_format)
    )
    return Packed(weight.shape[0], weight.shape[1], weight.dtype, data)


def take_rows(packed: Packed, ids: Tensor) -> Tensor:
    """Rows `ids` (any shape) of the packed weight, as an embedding looks them up: [*ids.shape,
    k].
    """
    return packed.data[ids]


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """y[m, n] = round(tree over k of fp32(x[m, k]) · fp32(w[n, k]) + bias[n]); x [..., k] -> [...,
    n] in x.dtype.
    """
    flat = x.reshape(-1, packed.k).float()
    y = _matmul(flat, packed.data)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], packed.n)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0) -> Tensor:
    """round(x · 1/sqrt(mean(x²) + eps) · (weight + offset)) over the last axis, in fp32, one
    rounding.
    """
    return _rms(x.float(), weight, eps, weight_offset).to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """s = x + residual, rounded to their type; returns (rms_norm(s), s). Equal to the two steps
    apart.
    """
    total = x + residual
    return _rms(total.float(), weight, eps, weight_offset).to(x.dtype), total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """round((x - mean) / sqrt(mean((x - mean)²) + eps) · weight + bias) over the last axis, in
    fp32.
    """
    values = x.float()
    size = values.shape[-1]
    centred = values - (_tree(values) / size).unsqueeze(-1)
    variance = _tree(centred * centred) / size
    y = centred * (1.0 / torch.sqrt(variance + eps)).unsqueeze(-1)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def act(x: Tensor, kind: str) -> Tensor:
    """The activation `kind` element by element, in fp32, rounded once to x.dtype."""
    return _activation(x.float(), kind).to(x.dtype)


def act_and_mul(x: Tensor, kind: str) -> Tensor:
    """[..., 2h] -> [..., h]: round(act(x[:h]) · x[h:]), in fp32."""
    half = x.shape[-1] // 2
    return (_activation(x[..., :half].float(), kind) * x[..., half:].float()).to(x.dtype)


def rotary(
    positions: Tensor,
    q: Tensor,
    k: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    rotary_dim: int,
    is_neox: bool,
) -> None:
    """Rotate q [T, Hq·D] and k [T, Hk·D] in place; the cache row is [cos | sin], each rotary_dim /
    2 wide.
    """
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)
    for rotated in (q, k):
        if rotated is None:
            continue
        part = rotated.unflatten(-1, (-1, head_size))[..., :rotary_dim]
        if is_neox:
            first, second = part[..., : rotary_dim // 2], part[..., rotary_dim // 2 :]
        else:
            first, second = part[..., 0::2], part[..., 1::2]
        a, b = first.float(), second.float()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)


def reshape_and_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store key and value [T, Hk, D] at their slots (block · block_size + offset); a negative slot
    is skipped.

    kv_cache [blocks, Hk, block_size, 2·D]: the key, then the value, of each position.
    """
    block_size, d = kv_cache.shape[2], kv_cache.shape[3] // 2
    slots = slot_mapping[: key.shape[0]]
    kept = torch.nonzero(slots >= 0).flatten()
    block, offset = slots[kept] // block_size, slots[kept] % block_size
    kv_cache[block, :, offset, :d] = key[kept]
    kv_cache[block, :, offset, d:] = value[kept]


def attention(
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
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of each sequence over its paged keys: [T, Hq, D] -> [T,
    Hq, D].

    Query i of sequence s stands at position p = seq_lens[s] - its query count + i and sees keys j ≤
    p (and j > p - window). Scores and the running values are fp32. The maximum is over all keys
    seen (a maximum has no order); sums over keys are a tree within tiles of `KEYS_PER_TILE` keys
    aligned to j = 0, then tile after tile in ascending order. A key that isn't seen adds an exact
    zero, so the bits depend on p and the sequence alone.
    """
    out = torch.zeros_like(q) if out is None else out
    block_size, d = kv_cache.shape[2], kv_cache.shape[3] // 2
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for s, length in enumerate(lens[: len(starts) - 1]):
        begin, end = starts[s], starts[s + 1]
        if end == begin or length == 0:
            continue
        blocks = block_table[s, : -(-length // block_size)].long()
        held = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length].float()  # [L, Hk, 2D]
        keys, values = held[..., :d], held[..., d:]
        step = max(1, _ELEMENTS // max(1, length * q.shape[1] * d))
        for i in range(begin, end, step):
            j = min(i + step, end)
            position = torch.arange(length - end + i, length - end + j)
            out[i:j] = _attend(
                q[i:j], keys, values, position, scale, window, softcap, alibi_slopes, sinks
            )
    return out


def softmax(x: Tensor) -> Tensor:
    """fp32 softmax over the last axis: exp(x - max) / tree sum."""
    shifted = x.float()
    weights = _exp(shifted - shifted.max(dim=-1, keepdim=True).values)
    return weights / _tree(weights).unsqueeze(-1)


def log_softmax(x: Tensor) -> Tensor:
    """fp32 log-softmax over the last axis: (x - max) - log(tree sum of exp(x - max))."""
    values = x.float()
    shifted = values - values.max(dim=-1, keepdim=True).values
    return shifted - _log(_tree(_exp(shifted))).unsqueeze(-1)


def sum(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Tree sum in fp32 along one axis, rounded to x.dtype."""
    total = _tree(x.movedim(dim, -1).float()).to(x.dtype)
    return total.unsqueeze(dim) if keepdim else total


def mean(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Tree sum in fp32 along one axis, divided by its length, rounded to x.dtype."""
    total = (_tree(x.movedim(dim, -1).float()) / x.shape[dim]).to(x.dtype)
    return total.unsqueeze(dim) if keepdim else total


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    """[M, k] · [n, k]ᵀ in fp32; blocks bound memory only, every element is one product and one
    tree.
    """
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty(rows, n, dtype=torch.float32)
    columns = max(1, min(n, _ELEMENTS // max(1, k)))
    for c in range(0, n, columns):
        block = weight[c : c + columns].float()
        step = max(1, _ELEMENTS // max(1, k * block.shape[0]))
        for r in range(0, rows, step):
            out[r : r + step, c : c + columns] = _tree(x[r : r + step, None, :] * block[None])
    return out


def _tree(x: Tensor) -> Tensor:
    """Sum over the last axis: halve it (first half plus second half; an odd last element is
    carried) until one is left.
    """
    while x.shape[-1] > 1:
        size = x.shape[-1]
        half = size // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((folded, x[..., 2 * half :]), dim=-1) if size % 2 else folded
    return x.squeeze(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _rms(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    scale = 1.0 / torch.sqrt(_tree(x * x) / x.shape[-1] + eps)
    y = x * scale.unsqueeze(-1)
    return y if weight is None else y * (weight.float() + weight_offset)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    length = keys.shape[0]
    queries = q.float().unflatten(1, (keys.shape[1], group))  # [T, Hk, G, D]
    scores = (
        _tree(queries[:, :, :, None] * keys.transpose(0, 1)[None, :, None]) * scale
    )  # [T, Hk, G, L]
    if softcap > 0:
        scores = softcap * _tanh(scores / softcap)
    distance = torch.arange(length)[None] - position[:, None]  # [T, L], ≤ 0 for keys seen
    if alibi_slopes is not None:
        scores = (
            scores + alibi_slopes.float().view(1, -1, group, 1) * distance.float()[:, None, None]
        )
    seen = distance <= 0
    if window > 0:
        seen &= distance > -window
    mask = seen[:, None, None]
    top = scores.masked_fill(~mask, -math.inf).max(dim=-1, keepdim=True).values
    if sinks is not None:
        sink = sinks.float().view(1, -1, group, 1)
        top = torch.maximum(top, sink)
    weights = torch.where(mask, _exp(scores - top), torch.zeros(()))
    pad = -length % KEYS_PER_TILE
    weights = torch.nn.functional.pad(weights, (0, pad)).unflatten(
        -1, (-1, KEYS_PER_TILE)
    )  # [T, Hk, G, N, 16]
    padded = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, pad)).unflatten(0, (-1, KEYS_PER_TILE))
    total = torch.zeros(weights.shape[:3])
    mixed = torch.zeros(queries.shape)
    for tile in range(weights.shape[3]):
        part = weights[:, :, :, tile]  # [T, Hk, G, 16]
        total = total + _tree(part)
        mixed = mixed + _tree(part[..., None, :] * padded[tile].permute(1, 2, 0)[None, :, None])
    if sinks is not None:
        total = total + _exp(sink - top).squeeze(-1)
    return (mixed / total.unsqueeze(-1)).flatten(1, 2).to(q.dtype)


def _exp(x: Tensor) -> Tensor:
    """e^x in fp32: x = n·ln 2 + r, a degree-6 polynomial in r, then a shift of the exponent. Below
    -87: exactly 0.
    """
    low = x < -87.0
    clamped = x.clamp(-87.0, 88.0)
    n = torch.round(clamped * _LOG2E)
    r = clamped - n * _LN2_HI
    r = r - n * _LN2_LO
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(torch.isnan(x), x, torch.where(low, torch.zeros(()), p * power))


def _log(x: Tensor) -> Tensor:
    """ln x for positive fp32 x, by two Newton steps on `_exp` from the exponent and a linear guess
    of the mantissa.
    """
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 127).float()
    mantissa = ((bits & 0x7FFFFF) | (127 << 23)).view(torch.float32)  # [1, 2)
    fold = mantissa > 1.4142135
    m = torch.where(fold, mantissa * 0.5, mantissa)
    e = torch.where(fold, exponent + 1.0, exponent)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * 0.11111111 + 0.14285714
    p = p * z + 0.2
    p = p * z + 0.33333334
    y = 2.0 * s + 2.0 * s * z * p
    y = y + e * -2.12194440e-4
    return y + e * 0.693359375


def _tanh(x: Tensor) -> Tensor:
    """tanh x = 1 - 2 / (e^{2x} + 1), on |x|, with the sign put back; for small |x| the odd
    series.
    """
    size = x.abs()
    big = 1.0 - 2.0 / (_exp(size * 2.0) + 1.0)
    z = size * size
    small = size * (1.0 + z * (-0.33333334 + z * (0.13333334 + z * -0.053968254)))
    return torch.where(size < 0.1, small, big).copysign(x)


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + _exp(-x))


def _erf(x: Tensor) -> Tensor:
    """erf by Abramowitz and Stegun 7.1.26 (absolute error below 1.5e-7)."""
    size = x.abs()
    t = 1.0 / (1.0 + 0.3275911 * size)
    p = t * 1.061405429 + -1.453152027
    p = p * t + 1.421413741
    p = p * t + -0.284496736
    p = p * t + 0.254829592
    return (1.0 - p * t * _exp(-(size * size))).copysign(x)


_SQRT_2_OVER_PI = 0.7978845608028654


def _activation(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return x * _sigmoid(x)
    if kind == "gelu":
        return 0.5 * x * (1.0 + _erf(x * 0.7071067811865476))
    if kind in ("gelu_tanh", "gelu_new", "gelu_fast"):
        return 0.5 * x * (1.0 + _tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))
    if kind == "quick_gelu":
        return x * _sigmoid(1.702 * x)
    if kind == "relu":
        return x.clamp_min(0.0)
    if kind == "relu2":
        return x.clamp_min(0.0) * x.clamp_min(0.0)
    if kind == "sigmoid":
        return _sigmoid(x)
    if kind == "tanh":
        return _tanh(x)
    raise ValueError(
        f"activation {kind!r}: no kernel; known: silu gelu gelu_tanh gelu_new quick_gelu relu relu2"
    )


def load(reason: str) -> SimpleNamespace:
    """The kernels as one object, shaped like the native ones. `reason` says why these run."""
    functions = (
        pack_weight, take_rows, linear, rms_norm, fused_add_rms_norm, layer_norm, act, act_and_mul, rotary,  # noqa: E501
        reshape_and_cache, attention, softmax, log_softmax, sum, mean,
    )  # fmt: skip
    return SimpleNamespace(name="torch", reason=reason, **{f.__name__: f for f in functions})
