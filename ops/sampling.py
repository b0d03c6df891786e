"""The seeded draw: the next token as a pure function of seed, choice, position, token id and
logits.

This module is the definition, in plain PyTorch; docs/draw.md says the same in words. Faster forms
of it (native code on the CPU, Triton on CUDA and Ascend) must return the same token ids.

Exact everywhere, because integers: the random words, the masses of top_p and min_p and every
decision that a filter takes about them. Exact on every device that rounds float32 multiply, add
and subtract as IEEE 754 says and does not contract them: everything else. No step uses a
library's exp or log, a fused multiply-add or a sum of floats.

Nothing is kept between draws. There is no state to rewind after a chunked prefill, a preemption
or a rejected token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

#: Part of the fingerprint. Change the number whenever any draw could change.
SAMPLER = "samebits-philox-gumbel/1"

#: Below this a temperature counts as 0, which is greedy. From here up it is used as given.
MIN_TEMPERATURE = 1e-5

#: Fourth word of the Philox counter for the draw of a token; other uses of a seed must take
#: another number.
DOMAIN_TOKEN = 1

#: The largest noise: the word 0, rounded up. Noise lies in [-3.1301, MAX_NOISE].
MAX_NOISE = 22.8740

MASS_BITS = 30  # the most likely token's mass is 2**30
TOP_P_BITS = 24  # top_p is used as floor(top_p * 2**24) / 2**24

_MASK32 = 0xFFFFFFFF
_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85

# log(1 + f) = f + f*f*P(f) for sqrt(1/2) <= 1 + f < sqrt(2), and exp(r) = 1 + r + r*r*Q(r) for
# |r| <= log(2)/2: minimax fits (relative error 3e-8 and 3e-9), rounded to float32. Lowest degree
# first. Part of the definition.
LOG_P = (
    -0.49999991059303284, 0.33333951234817505, -0.25001755356788635, 0.19962073862552643,
    -0.16570493578910828, 0.14917944371700287, -0.14307618141174316, 0.0873505026102066,
)  # fmt: skip
EXP_Q = (
    0.4999999403953552, 0.1666651964187622, 0.04166839271783829, 0.00836878176778555,
    0.0013814570847898722,
)  # fmt: skip
LN2 = 0.6931471824645996  # float32
LN2_HI, LN2_LO = 0.693359375, -0.00021219444170128554  # LN2_HI has 9 bits: n * LN2_HI is exact
LOG2_E = 1.4426950216293335
SQRT_HALF_BITS = 0x3F3504F3  # float32 sqrt(1/2), as bits
LOWEST_T = -21.25  # below it the mass is 0


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011).

    int64 tensors that hold 32-bit words; they broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = (
            c0 * _PHILOX_M0,
            c2 * _PHILOX_M1,
        )  # wraps beyond 63 bits; the bits themselves are right
        c0, c1, c2, c3 = (
            ((b >> 32) & _MASK32) ^ c1 ^ k0,
            b & _MASK32,
            ((a >> 32) & _MASK32) ^ c3 ^ k1,
            a & _MASK32,
        )
        k0, k1 = (k0 + _PHILOX_W0) & _MASK32, (k1 + _PHILOX_W1) & _MASK32
    return c0, c1, c2, c3


def words(
    seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """The random word of every token: int64 [N] each -> int64 [N, vocab_size] with values in [0,
    2**32).

    Token v takes word (v // 16) % 4 of the block whose counter is (16 * (v // 64) + v % 16,
    position, choice, DOMAIN_TOKEN) under the key (low half of the seed, high half). So one block
    serves four tokens that lie 16 apart, which is what vector code wants, and no two of (seed,
    choice, position, token) share a word.
    """
    blocks = (vocab_size + 63) // 64
    c0 = torch.arange(blocks * 16, dtype=torch.int64, device=seeds.device)[None, :]
    zero = torch.zeros_like(c0)
    seed, choice, position = seeds[:, None], choices[:, None], positions[:, None]
    out = philox(
        (c0, (position & _MASK32) + zero, (choice & _MASK32) + zero, zero + DOMAIN_TOKEN),
        (seed & _MASK32, (seed >> 32) & _MASK32),
    )
    n = seeds.shape[0]
    table = torch.stack([w.view(n, blocks, 16) for w in out], dim=2)
    return table.reshape(n, blocks * 64)[:, :vocab_size]


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive, normal float32, by multiplies and adds in one order.

    Same shape.
    """
    bits = x.view(torch.int32)
    e = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (e << 23)).view(torch.float32) - 1.0
    return _log_of(f, e.to(torch.float32))


def _log_of(f: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    p = torch.full_like(f, LOG_P[-1])
    for c in LOG_P[-2::-1]:
        p = p * f + c
    return (f + (f * f) * p) + e * LN2


def gumbel(word: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise -log(-log(u)) of each word, u = 1 - (word + 0.5) / 2**32. int64 ->
    float32, same shape.

    The uniform is never rounded to 0 or 1: below 2**30 the logarithm is taken from 1 - u, and
    above from u, either of which float32 holds to full precision. Small words give large noise.
    """
    v = (word.to(torch.float32) + 0.5) * 2.0**-32
    u = ((_MASK32 - word).to(torch.float32) + 0.5) * 2.0**-32
    near_one = word < 2**30
    bits = u.view(torch.int32)
    e = torch.where(near_one, torch.zeros_like(bits), (bits - SQRT_HALF_BITS) >> 23)
    f = torch.where(near_one, -v, (bits - (e << 23)).view(torch.float32) - 1.0)
    return -log(-_log_of(f, e.to(torch.float32)))


def mass(t: torch.Tensor) -> torch.Tensor:
    """floor(exp(t) * 2**30) for t <= 0, as int64: what a token weighs in top_p and min_p.
    float32, same shape.

    An integer, so that a sum of masses does not depend on its order. Never increases as t falls;
    0 below LOWEST_T.
    """
    live = t >= LOWEST_T
    t = torch.where(live, t, torch.zeros_like(t))
    n = (t * LOG2_E - 0.5).to(torch.int32)  # towards zero: the nearest integer, as t <= 0
    nf = n.to(torch.float32)
    r = (t - nf * LN2_HI) - nf * LN2_LO
    q = torch.full_like(t, EXP_Q[-1])
    for c in EXP_Q[-2::-1]:
        q = q * r + c
    y = (r * r) * q + r + 1.0
    scale = ((n + (127 + MASS_BITS)) << 23).view(torch.float32)
    return torch.where(live, (y * scale).to(torch.int64), 0)


@dataclass(frozen=True)
class Rows:
    """The options of N rows as the draw uses them, on the host.

    Built by `rows`; float64 in, integers out.
    """

    inv_t: npt.NDArray[np.float32]  # 1 / temperature rounded to float32; 0 marks a greedy row
    top_k: npt.NDArray[np.int64]  # 0: off
    top_p: npt.NDArray[np.int64]  # floor(top_p * 2**24), at least 1; 2**24: off
    min_p: npt.NDArray[np.int64]  # ceil(min_p * 2**30); 0: off
    seed: npt.NDArray[np.int64]
    choice: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    #: What a device made of all but `position`; `at` keeps it.
    forms: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def at(self, position: npt.NDArray[np.int64]) -> Rows:
        """The same rows at other positions: int64 [N], not checked."""
        other = object.__new__(Rows)
        other.__dict__.update(self.__dict__, position=position)
        return other

    @property
    def filtered(self) -> npt.NDArray[np.bool_]:
        """Rows that need a filter: bool [N].

        Greedy rows need none, since every filter keeps the best token.
        """
        some = (self.top_k > 0) | (self.top_p < 2**TOP_P_BITS) | (self.min_p > 0)
        return np.asarray((self.inv_t > 0) & some)


def rows(
    temperature: Sequence[float] | npt.NDArray[Any],
    top_k: Sequence[int] | npt.NDArray[Any],
    top_p: Sequence[float] | npt.NDArray[Any],
    min_p: Sequence[float] | npt.NDArray[Any],
    seeds: Sequence[int] | npt.NDArray[Any],
    choices: Sequence[int] | npt.NDArray[Any],
    positions: Sequence[int] | npt.NDArray[Any],
) -> Rows:
    """Checked options, one element a row.

    Raises `ValueError` with the option's name on a value outside its range.
    """
    t = np.asarray(temperature, dtype=np.float64)
    p = np.asarray(top_p, dtype=np.float64)
    m = np.asarray(min_p, dtype=np.float64)
    k = np.asarray(top_k, dtype=np.int64)
    choice, position = np.asarray(choices, dtype=np.int64), np.asarray(positions, dtype=np.int64)
    for name, ok in (
        ("temperature", np.isfinite(t) & (t >= 0)),
        ("top_p", (p > 0) & (p <= 1)),
        ("min_p", (m >= 0) & (m <= 1)),
        ("choice", (choice >= 0) & (choice <= _MASK32)),
        ("position", (position >= 0) & (position <= _MASK32)),
    ):
        if not ok.all():
            raise ValueError(f"{name} is out of range in row {int(np.argmin(ok))}")
    greedy = t < MIN_TEMPERATURE
    return Rows(
        inv_t=np.where(greedy, 0.0, 1.0 / np.where(greedy, 1.0, t)).astype(np.float32),
        top_k=np.maximum(k, 0),
        top_p=np.where(p < 1, np.maximum(np.floor(p * 2**TOP_P_BITS), 1), 2**TOP_P_BITS).astype(
            np.int64
        ),
        min_p=np.ceil(m * 2**MASS_BITS).astype(np.int64),
        seed=np.asarray(seeds, dtype=np.int64),
        choice=choice,
        position=position,
    )


def cleaned(logits: torch.Tensor) -> torch.Tensor:
    """float32 [N, V] with NaN as minus infinity and -0 as 0: equal values are equal bits."""
    return torch.where(logits.isnan(), -torch.inf, logits) + 0.0


def shifted(x: torch.Tensor) -> torch.Tensor:
    """`cleaned` logits minus their row's largest: float32 [N, V].

    The best tokens are exactly 0, even at infinity.
    """
    best = x.amax(dim=-1, keepdim=True)
    d = torch.where(x == best, torch.zeros_like(x), x - best)
    return torch.where(x == -torch.inf, -torch.inf, d)


def kept(x: torch.Tensor, t: torch.Tensor, opts: Rows, index: Sequence[int]) -> torch.Tensor:
    """Which tokens the filters leave: bool [R, V] for the R rows `index` of `opts`.

    x: `cleaned` logits [R, V]; t: `shifted` logits times inv_t [R, V].

    All three filters keep a prefix of one order: logit from high to low, then token id from low
    to high. min_p keeps the tokens whose mass is at least min_p * 2**30; top_k the first k of
    those; top_p the shortest prefix of what is left whose mass is at least top_p of the mass of
    what is left. At least one token stays.
    """
    vocab = x.shape[1]
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices
    q = mass(t).gather(-1, order)
    rank = torch.arange(vocab, device=x.device)[None, :]

    def column(a: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(a[list(index)])).to(x.device)[:, None]

    floor, k, p = column(opts.min_p), column(opts.top_k), column(opts.top_p)
    keep = (q >= floor) & ((k == 0) | (rank < k))
    running = torch.where(keep, q, 0).cumsum(-1)
    total = running[:, -1:]
    low = total & (2**TOP_P_BITS - 1)
    target = (total >> TOP_P_BITS) * p + ((low * p) >> TOP_P_BITS)
    before = running - torch.where(keep, q, 0)
    keep = keep & ((before < target) | (p == 2**TOP_P_BITS))
    keep = keep | (rank == 0)
    return torch.zeros_like(keep).scatter_(1, order, keep)


def first_argmax(score: torch.Tensor) -> torch.Tensor:
    """Index of the largest element of each row, the lowest index on ties.

    No NaN. [N, V] -> int64 [N].
    """
    vocab = score.shape[-1]
    index = torch.arange(vocab, device=score.device)
    hit = score == score.amax(dim=-1, keepdim=True)
    return torch.where(hit, index, vocab).amin(dim=-1)


def draw_rows(logits: torch.Tensor, opts: Rows) -> torch.Tensor:
    """The definition. float32 [N, V], changed by nobody; token ids int64 [N] on the same device.

    score = (logit - largest logit) * inv_t + gumbel(word), two roundings; -inf where a filter
    dropped the token. The token is the first with the largest score. A greedy row takes the first
    with the largest logit. A row whose logits are all minus infinity or NaN gives token 0.
    """
    device = logits.device

    def column(a: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(a)).to(device)

    x = cleaned(logits)
    if not (opts.inv_t > 0).any():
        return first_argmax(x)
    inv_t = column(opts.inv_t)[:, None]
    word = words(column(opts.seed), column(opts.choice), column(opts.position), x.shape[1])
    t = shifted(x) * inv_t
    t = torch.where(x == -torch.inf, -torch.inf, t)  # minus infinity times 0 in a greedy row
    score = t + gumbel(word)
    index = np.nonzero(opts.filtered)[0].tolist()
    if index:
        at = torch.tensor(index, device=device)
        score[at] = torch.where(kept(x[at], t[at], opts, index), score[at], -torch.inf)
    return first_argmax(torch.where(inv_t > 0, score, x))


def draw(
    logits: torch.Tensor,
    temperature: Sequence[float] | npt.NDArray[Any],
    top_k: Sequence[int] | npt.NDArray[Any],
    top_p: Sequence[float] | npt.NDArray[Any],
    min_p: Sequence[float] | npt.NDArray[Any],
    seeds: Sequence[int] | npt.NDArray[Any],
    choices: Sequence[int] | npt.NDArray[Any],
    positions: Sequence[int] | npt.NDArray[Any],
) -> torch.Tensor:
    """Draw one token for each row by the fastest form that this device has. Raises `ValueError`
    as `rows` does.

    logits: float32 [N, V] after penalties and masks, not changed; bfloat16 and float16 mean the
    same numbers. The options are host values,
    one a row: temperature (0: greedy), top_k (0: off), top_p (1: off), min_p (0: off), seeds
    (int64), choices and positions (0 to 2**32 - 1). Returns int64 [N] on the logits' device. No
    row depends on another.
    """
    return draw_with(logits, rows(temperature, top_k, top_p, min_p, seeds, choices, positions))


def draw_with(logits: torch.Tensor, opts: Rows) -> torch.Tensor:
    """`draw` with options that were checked before, one element a row."""
    if logits.device.type == "cpu":
        from ops.kernels.cpu import draw as cpu

        native = cpu.load()
        return native.draw(logits, opts) if native else draw_rows(logits.float(), opts)
    if logits.device.type == "cuda":
        from ops.kernels.triton import draw as triton

        return triton.draw(logits, opts)
    return draw_rows(logits.float(), opts)
