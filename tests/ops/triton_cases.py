"""What test_triton_kernels runs in the interpreter's process. Not collected by pytest itself."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from ops.kernels.triton import attention as att
from ops.kernels.triton import bmm, linear, moe, norm, rank, reduce, softmax

T = linear.Tile
TILES = (T(16, 16, 32), T(16, 32, 64), T(64, 32, 32))


class Checks:
    """Counts what held; a planted fault must be seen as different."""

    def __init__(self) -> None:
        self.held = 0
        self.seen = True

    def equal(self, a: torch.Tensor, b: torch.Tensor, what: str) -> None:
        assert a.shape == b.shape, f"{what}: {a.shape} {b.shape}"
        assert torch.equal(a, b), f"{what}: {(a.float() - b.float()).abs().max()}"
        self.held += 1

    def close(self, a: torch.Tensor, b: torch.Tensor, what: str, tolerance: float = 2e-3) -> None:
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < tolerance, f"{what}: {error}"
        self.held += 1

    def differs(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.seen &= not torch.equal(a, b)


def grid(*shape: int, scale: float = 1 / 32) -> torch.Tensor:
    """Small integers times a power of two: their products and sums are exact in float32."""
    return (torch.randint(-8, 9, shape).float() * scale).half()


def case_linear(c: Checks) -> None:
    x, w, b = grid(37, 1100), grid(50, 1100), grid(50)
    wanted = (x.float() @ w.float().t() + b.float()).half()
    for t in TILES:
        c.equal(linear.linear(x, w, b, tile=t), wanted, f"{t}")
        for split in (2, 3):
            for two_pass in (False, True):
                y = linear.linear(x, w, b, tile=t, split=split, two_pass=two_pass)
                c.equal(y, wanted, f"{t} split {split} {two_pass}")
        c.equal(linear.linear(x[7:8], w, b, tile=t), wanted[7:8], "one row")
    c.equal(linear.linear(x[:0], w, tile=TILES[0]), wanted[:0], "no rows")
    strided = torch.cat([x, x], 1)[:, :1100]
    c.equal(linear.linear(strided, w, b, tile=TILES[0]), wanted, "strided rows")
    w[3, 1099] += 1
    c.differs(linear.linear(x, w, b, tile=TILES[0]), wanted)


def case_bmm(c: Checks) -> None:
    a, b = grid(3, 21, 70), grid(3, 70, 33)
    wanted = torch.bmm(a.float(), b.float()).half()
    for t in TILES:
        c.equal(bmm.bmm(a, b, tile=t), wanted, f"{t}")
        turned = b.transpose(1, 2).contiguous().transpose(1, 2)
        c.equal(bmm.bmm(a[1:, 5:], turned[1:], tile=t), wanted[1:, 5:], "strides")
    a[2, 20, 69] += 1
    c.differs(bmm.bmm(a, b, tile=TILES[0]), wanted)


def moe_inputs() -> tuple[torch.Tensor, ...]:
    x, w13, w2 = grid(13, 48), grid(5, 64, 48), grid(5, 48, 32)
    weights = torch.softmax(torch.randn(13, 2), -1)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(13)]).int()
    return x, w13, w2, weights, ids


def case_moe(c: Checks) -> None:
    x, w13, w2, weights, ids = moe_inputs()
    wanted = torch.zeros(13, 48)
    for m in range(13):
        for s in range(2):
            e = int(ids[m, s])
            gate, up = (w13[e].float() @ x[m].float()).half().float().chunk(2)
            act = ((gate / (1 + torch.exp(-gate))).half().float() * up).half().float()
            wanted[m] += (weights[m, s] * (w2[e].float() @ act)).half().float()
    for t in TILES:
        y = moe.moe(x, w13, w2, weights, ids, tile=t)
        c.close(y, wanted, f"{t}")
        for row in (0, 12):
            one = moe.moe(x[row : row + 1], w13, w2, weights[row : row + 1], ids[row : row + 1],
                          tile=t)  # fmt: skip
            c.close(one, y[row : row + 1], "alone", 1e-3)
    slots = torch.randn(4, 3, 20).half()
    ordered = (slots[:, 0].float() + slots[:, 1].float() + slots[:, 2].float()).half()
    c.equal(moe.sum_slots(slots), ordered, "slots in order")
    c.differs(moe.moe(x, w13, w2, weights.flip(1), ids, tile=TILES[0]), y)


def case_sort(c: Checks) -> None:
    for block in (16, 64):
        ids = moe_inputs()[4]
        rows, owner, used = moe.sort_by_expert(ids, 5, block)
        flat = ids.reshape(-1)
        kept = rows[rows < flat.numel()].long()
        c.equal(kept.sort().values, torch.arange(flat.numel()), "every pair once")
        c.equal(owner.repeat_interleave(block)[rows < flat.numel()], flat[kept], "its expert")
        c.equal(rows[int(used) :], torch.full_like(rows[int(used) :], flat.numel()), "padding")
    c.differs(owner, owner + 1)


def case_norm(c: Checks) -> None:
    for columns in (128, 576, 2048):
        x, r = torch.randn(9, columns).half(), torch.randn(9, columns).half()
        w = torch.rand(columns).half() + 0.5
        for gemma in (False, True):
            s = x.float() + r.float()
            n = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6)
            wanted = n * (w.float() + 1) if gemma else n.half().float() * w.float()
            y, added = norm.rms_norm(x, w, 1e-6, r, gemma=gemma)
            c.close(y, wanted.half(), f"{columns} {gemma}")
            c.equal(added, s.half(), "residual")
            for row in range(9):
                one, _ = norm.rms_norm(x[row : row + 1], w, 1e-6, r[row : row + 1],
                                       gemma=gemma)  # fmt: skip
                c.equal(one, y[row : row + 1], "alone")
    qkv = torch.randn(6, 5 * 128).half()
    heads = qkv[:, 128:512].view(6, 3, 128)
    w = torch.rand(128).half()
    y, _ = norm.rms_norm(heads, w, 1e-6)
    c.equal(y, norm.rms_norm(heads.contiguous(), w, 1e-6)[0], "strided heads")
    odd = qkv[:, 1:129]
    c.equal(norm.rms_norm(odd, w, 1e-6)[0], norm.rms_norm(odd.clone(), w, 1e-6)[0], "misaligned")
    c.differs(norm.rms_norm(heads, w, 1e-2)[0], y)


def case_softmax(c: Checks) -> None:
    for columns in (7, 4096, 9001):
        x = torch.randn(4, columns) * 3
        x[1, : columns // 2] = float("-inf")
        for ours, theirs in (
            (softmax.softmax, torch.softmax),
            (softmax.log_softmax, torch.log_softmax),
        ):
            y = ours(x)
            finite = torch.isfinite(y)
            wanted = theirs(x.double(), -1).float()
            c.equal(finite, torch.isfinite(wanted), "infinities")
            c.close(y[finite], wanted[finite], f"{columns}", 1e-6)
            c.equal(ours(x[2:3]), y[2:3], "alone")
            c.equal(ours(x.flip(0)).flip(0), y, "reversed")
    c.differs(softmax.softmax(x + torch.arange(columns) * 1e-3), softmax.softmax(x))


def case_rank(c: Checks) -> None:
    x = torch.randint(-5, 5, (6, 20000)).float()
    tokens = torch.randint(0, 20000, (6,))
    got = rank.rank(x, tokens)
    mine = x.gather(1, tokens[:, None])
    ids = torch.arange(20000)
    before = (x > mine) | ((x == mine) & (ids <= tokens[:, None]))
    c.equal(got, before.sum(-1), "rank")
    for row in (0, 3, 5):
        c.equal(rank.rank(x[row : row + 1], tokens[row : row + 1]), got[row : row + 1], "alone")
    c.differs(rank.rank(-x, tokens), got)


def case_reduce(c: Checks) -> None:
    x = torch.randn(5, 6, 1500)
    for dims in ([2], [1], [0, 2], []):
        for keep in (False, True):
            for mean in (False, True):
                wanted = (torch.mean if mean else torch.sum)(
                    x.double(), dims or [0, 1, 2], keep
                ).float()
                y = reduce.sum_dims(x, dims, keep, torch.float32, mean)
                assert y.shape == wanted.shape
                c.close(y, wanted, f"{dims}", 1e-4)
    c.equal(reduce.sum_dims(x[3:4], [2], False, torch.float32),
            reduce.sum_dims(x, [2], False, torch.float32)[3:4], "alone")  # fmt: skip
    c.differs(reduce.sum_dims(x, [2], False, torch.float32), x.sum(2) + 1e-3)


def dense(q, k, v, context, scale, window, softcap, slopes, sinks):
    """Attention of one sequence in float64; q [t, Hq, D], k and v [context, Hk, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    at = torch.arange(context - q.shape[0], context)[:, None]
    key = torch.arange(context)[None, :]
    if slopes is not None:
        s = s + slopes.double()[:, None, None] * (key - at)
    seen = (key <= at) & ((key > at - window) if window else torch.ones_like(key, dtype=torch.bool))
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, s.shape[1], 1)], -1)
    p = torch.softmax(s, -1)[..., :context]
    return torch.einsum("hqk,khd->qhd", p, v)


def case_attention(c: Checks) -> None:
    contexts, new = [200, 67, 1, 130], [1, 67, 1, 50]
    heads, kv_heads, dim, page = 6, 2, 32, 16
    total = sum(new)
    q = torch.randn(total, heads, dim).half()
    pages = torch.randperm(40).int()
    table = torch.zeros(4, 13, dtype=torch.int32)
    cache = torch.randn(40, 2, page, kv_heads, dim).half()
    used = 0
    for s, n in enumerate(contexts):
        count = -(-n // page)
        table[s, :count] = pages[used : used + count]
        used += count
    k_cache, v_cache = cache.unbind(1)
    start = torch.tensor([0, *new]).cumsum(0).int()
    lengths = torch.tensor(contexts, dtype=torch.int32)
    options: list[dict[str, object]] = [
        {}, {"window": 40}, {"softcap": 5.0}, {"alibi_slopes": torch.rand(heads)},
        {"sinks": torch.randn(heads)}]  # fmt: skip
    for option in options:
        first: torch.Tensor | None = None
        for block_m, parallel in ((16, 0), (64, 0), (16, 4), (32, 2)):
            y = att.attention(q, k_cache, v_cache, table, start, lengths, 0.2, segment=128,
                              schedule=att.Schedule(block_m), parallel_segments=parallel,
                              **option)  # fmt: skip
            if first is None:
                first = y
                for s, n in enumerate(contexts):
                    ids = table[s].long()
                    keys, values = (
                        x[ids].reshape(-1, kv_heads, dim)[:n] for x in (k_cache, v_cache)
                    )
                    wanted = dense(q[start[s] : start[s + 1]], keys, values, n, 0.2,
                                   option.get("window", 0), option.get("softcap", 0.0),
                                   option.get("alibi_slopes"), option.get("sinks"))  # fmt: skip
                    c.close(y[start[s] : start[s + 1]], wanted, f"{option} sequence {s}")
            c.close(y, first, f"{option} {block_m} {parallel}", 3e-4)
    one = att.attention(q[:1], k_cache, v_cache, table[:1], start[:2], lengths[:1], 0.2,
                        segment=128, schedule=att.Schedule(16))  # fmt: skip
    whole = att.attention(q, k_cache, v_cache, table, start, lengths, 0.2, segment=128,
                          schedule=att.Schedule(16))  # fmt: skip
    c.equal(one, whole[:1], "alone")
    c.differs(whole, att.attention(q, v_cache, k_cache, table, start, lengths, 0.2, segment=128,
                                   schedule=att.Schedule(16)))  # fmt: skip


def run(name: str) -> None:
    """Run one case; the last line printed is its count as JSON."""
    torch.manual_seed(0)
    checks = Checks()
    case: Callable[[Checks], None] = globals()[f"case_{name}"]
    case(checks)
    print(json.dumps({"held": checks.held, "planted_fault_seen": checks.seen}))
