"""The single steps of the seeded draw as Triton device functions: same bits as ops/sampling.py.

Multiplications and additions must not be contracted: kernels that use these are launched with
enable_fp_fusion=False where the backend knows it. Nothing here calls a library's exp or log.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_NOISE = tl.constexpr(22.8740)
MIN_NOISE = tl.constexpr(-3.1301)
LOWEST_T = tl.constexpr(-21.25)
_LN2 = tl.constexpr(0.6931471824645996)
_SQRT_HALF = tl.constexpr(0x3F3504F3)


@triton.jit
def _mulhi(a, m: tl.constexpr, SPLIT: tl.constexpr):
    """High half of the 64-bit product of uint32 lanes and a constant; SPLIT: from 16-bit halves,
    for backends without the instruction."""
    if SPLIT:
        lo, hi = a & 0xFFFF, a >> 16
        m_lo: tl.constexpr = m & 0xFFFF
        m_hi: tl.constexpr = m >> 16
        mid = hi * m_lo + ((lo * m_lo) >> 16)
        low = (mid & 0xFFFF) + lo * m_hi
        out = hi * m_hi + (mid >> 16) + (low >> 16)
    else:
        out = tl.umulhi(a, tl.full(a.shape, m, tl.uint32))
    return out


@triton.jit
def philox(c0, c1, c2, c3, k0, k1, SPLIT: tl.constexpr):
    """Philox4x32-10 on uint32 tensors of one shape; keys are uint32 scalars or tensors."""
    for _ in tl.static_range(10):
        hi_a, hi_b = _mulhi(c0, 0xD2511F53, SPLIT), _mulhi(c2, 0xCD9E8D57, SPLIT)
        lo_a = c0 * tl.full(c0.shape, 0xD2511F53, tl.uint32)
        lo_b = c2 * tl.full(c2.shape, 0xCD9E8D57, tl.uint32)
        c0 = hi_b ^ c1 ^ k0
        c1 = lo_b
        c2 = hi_a ^ c3 ^ k1
        c3 = lo_a
        k0 = k0 + tl.full(k0.shape, 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full(k1.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _log_of(f, e):
    p = f * 0.0873505026102066 + -0.14307618141174316
    p = p * f + 0.14917944371700287
    p = p * f + -0.16570493578910828
    p = p * f + 0.19962073862552643
    p = p * f + -0.25001755356788635
    p = p * f + 0.33333951234817505
    p = p * f + -0.49999991059303284
    return (f + (f * f) * p) + e * _LN2


@triton.jit
def _rounded(w):
    """uint32 -> float32, to nearest: both halves are exact, their sum is rounded once."""
    high = (w >> 16).to(tl.int32).to(tl.float32) * 65536.0
    return high + (w & 0xFFFF).to(tl.int32).to(tl.float32)


@triton.jit
def gumbel(w):
    """Gumbel noise of uint32 words, float32."""
    v = (_rounded(w) + 0.5) * 2.3283064365386963e-10
    u = (_rounded(w ^ 0xFFFFFFFF) + 0.5) * 2.3283064365386963e-10
    near_one = (w >> 30) == 0
    bits = u.to(tl.int32, bitcast=True)
    e = (bits - _SQRT_HALF) >> 23
    f = tl.where(near_one, -v, (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0)
    x = -_log_of(f, tl.where(near_one, 0, e).to(tl.float32))
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - _SQRT_HALF) >> 23
    return -_log_of((bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0, e.to(tl.float32))


@triton.jit
def mass(t):
    """floor(exp(t) * 2**30) of t <= 0, int32; 0 below LOWEST_T and for NaN."""
    live = t >= LOWEST_T
    t = tl.where(live, t, 0.0)
    n = (t * 1.4426950216293335 - 0.5).to(tl.int32)
    nf = n.to(tl.float32)
    r = (t - nf * 0.693359375) - nf * -0.00021219444170128554
    q = r * 0.0013814570847898722 + 0.00836878176778555
    q = q * r + 0.04166839271783829
    q = q * r + 0.1666651964187622
    q = q * r + 0.4999999403953552
    y = (r * r) * q + r + 1.0
    scale = ((n + 157) << 23).to(tl.float32, bitcast=True)
    return tl.where(live, (y * scale).to(tl.int32), 0)


@triton.jit
def cleaned(x):
    """NaN is minus infinity and -0 is 0."""
    x = tl.where(x != x, float("-inf"), x)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def shifted(x, best):
    """x - best, exactly 0 where they are equal (also at infinity)."""
    return tl.where(x == best, 0.0, x - best)


@triton.jit
def order(x):
    """int32 that sorts as the float32 does (x cleaned)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
