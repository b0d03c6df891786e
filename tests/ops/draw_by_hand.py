"""The draw again, from docs/draw.md alone: one row, numpy, no torch and nothing of ours."""

from __future__ import annotations

import math

import numpy as np

F = np.float32
LOG = [-0.49999991059303284, 0.33333951234817505, -0.25001755356788635, 0.19962073862552643]
LOG += [-0.16570493578910828, 0.14917944371700287, -0.14307618141174316, 0.0873505026102066]
EXP = [0.4999999403953552, 0.1666651964187622, 0.04166839271783829, 0.00836878176778555]
EXP += [0.0013814570847898722]


def philox(ctr: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        a, b = 0xD2511F53 * ctr[0], 0xCD9E8D57 * ctr[2]
        ctr = [b >> 32 ^ ctr[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ ctr[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return ctr


def word(seed: int, choice: int, position: int, v: int) -> int:
    key = [seed % 2**32, (seed >> 32) % 2**32]
    return philox([16 * (v // 64) + v % 16, position, choice, 1], key)[v // 16 % 4]


def ln1p(f: np.float32, e: int) -> np.float32:
    p = F(LOG[7])
    for c in LOG[6::-1]:
        p = F(F(p * f) + F(c))
    return F(F(f + F(F(f * f) * p)) + F(F(e) * F(0.6931471824645996)))


def ln(x: np.float32) -> np.float32:
    m, e = math.frexp(float(x))  # m in [1/2, 1)
    if F(m) < F(math.sqrt(0.5)):
        m, e = 2 * m, e - 1
    return ln1p(F(F(m) - F(1)), e)


def noise(w: int) -> np.float32:
    if w < 2**30:
        inner = ln1p(F(-F(F(F(w) + F(0.5)) * F(2.0**-32))), 0)
    else:
        inner = ln(F(F(F(2**32 - 1 - w) + F(0.5)) * F(2.0**-32)))
    return F(-ln(F(-inner)))


def mass(t: np.float32) -> int:
    if not t >= -21.25:
        return 0
    n = int(F(F(t * F(1.4426950216293335)) - F(0.5)))
    r = F(F(t - F(F(n) * F(0.693359375))) - F(F(n) * F(-0.00021219444170128554)))
    q = F(EXP[4])
    for c in EXP[3::-1]:
        q = F(F(q * r) + F(c))
    return int(float(F(F(F(F(r * r) * q) + r) + F(1))) * 2.0 ** (n + 30))


def draw(logits, temperature, top_k, top_p, min_p, seed, choice, position):
    x = [float("-inf") if math.isnan(v) else float(v) + 0.0 for v in logits]
    best = max(x)
    if best == float("-inf"):
        return 0
    if temperature < 1e-5:
        return x.index(best)
    inv = F(1 / temperature)
    with np.errstate(all="ignore"):
        t = [F(0) if v == best else F(F(F(v) - F(best)) * inv) for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    left = [i for i in order if mass(t[i]) >= math.ceil(min_p * 2**30)]
    left = left[: top_k if top_k > 0 else None]
    if top_p < 1:
        total = sum(mass(t[i]) for i in left)
        target = total * max(int(top_p * 2**24), 1) // 2**24
        n = 0
        while n < len(left) and sum(mass(t[i]) for i in left[:n]) < target:
            n += 1
        left = left[:n]
    live = [i for i in left if x[i] > float("-inf")]
    return max(live, key=lambda i: (F(t[i] + noise(word(seed, choice, position, i))), -i))
