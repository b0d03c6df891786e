"""The compiled CPU kernels: the bits of a row depend on that row alone, and every instruction set
agrees.

Invariance is `torch.equal`. Closeness is to a float64 computation on the same inputs, with the
tolerance stated at each place: a few units in the last place of the output type, scaled by the
length of the sum where fp32 decides.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ops.kernels.cpu import build, load

ROWS = [*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(576, 576), (960, 576), (576, 1536), (49, 80), (33, 13), (7, 1), (1003, 64), (16, 2048)]
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _native() -> list[str]:
    best = build.machine_isa()
    return {"avx512": ["avx512", "avx2"], "avx2": ["avx2"], "neon": ["neon"]}.get(best or "", [])


if not _native():
    pytest.skip("no instruction set that the kernels use", allow_module_level=True)
try:
    build.find_compiler()
except build.NoCompiler as fault:
    pytest.skip(str(fault), allow_module_level=True)


@pytest.fixture(scope="module")
def kernels():
    loaded = load()
    assert loaded.name.startswith("native-"), loaded.reason
    return loaded


@pytest.fixture(params=_native())
def each_isa(request):
    return load(request.param)


def rand(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, std: float = 1.0
) -> Tensor:
    gen = torch.Generator().manual_seed(seed + 7919 * sum(shape))
    return (torch.randn(*shape, generator=gen) * std).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: also the sign of zero."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    as_int = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))


def first_row_that_moves(op, x: Tensor, rows: list[int] = ROWS) -> str | None:
    """None if op([M, K]) gives each row the same bits for every M and at every place; else where it
    does not.
    """
    full = op(x)
    for m in rows:
        for start in {0, 1, (len(x) - m) // 2, len(x) - m}:
            if start + m <= len(x) and not same(op(x[start : start + m]), full[start : start + m]):
                return f"{m} rows from row {start}"
    return None


# -- linear ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_rows_do_not_move(kernels, each_isa, shape, dtype):
    n, k = shape
    weight, bias, x = (
        rand(n, k, dtype=dtype, std=0.03),
        rand(n, dtype=dtype),
        rand(257, k, dtype=dtype),
    )
    packed = kernels.pack_weight(weight, inplace=False)

    def op(rows: Tensor) -> Tensor:
        return each_isa.linear(rows, packed, bias)

    assert first_row_that_moves(op, x) is None
    assert same(op(x), kernels.linear(x, packed, bias)), "instruction sets disagree"
    exact = x.double() @ weight.double().T + bias.double()
    bound = EPS[dtype] * exact.abs() + k * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
    assert ((op(x).double() - exact).abs() <= bound + 2.0**-24).all()


def test_linear_follows_the_written_order(kernels):
    """k ascending, one FMA each, bias last. An FMA of fp32 numbers is exact in fp64 up to its own
    single rounding.
    """
    n, k = 21, 37
    weight, bias, x = rand(n, k, std=0.03), rand(n), rand(5, k)
    acc = torch.zeros(5, n)
    for i in range(k):
        product = x[:, i : i + 1].double() * weight[:, i].double()  # 48 bits: exact
        acc = _round_sum_once(product, acc)
    assert same(kernels.linear(x, kernels.pack_weight(weight, inplace=False), bias), acc + bias)


def _round_sum_once(product: Tensor, acc: Tensor) -> Tensor:
    """fp32(product + acc) with one rounding: rounds to odd in fp64 first, so that the second
    rounding is right.
    """
    total = product + acc.double()
    part = total - product
    error = (product - (total - part)) + (acc.double() - part)  # two-sum: exact
    bits = total.view(torch.int64)
    even = (bits & 1) == 0
    away = torch.where((error > 0) == (total > 0), 1, -1)
    bits = torch.where((error != 0) & even, bits + away, bits)
    return bits.view(torch.float64).float()


@pytest.mark.parametrize("size", [1.0, 1e-19, 1e-38], ids=str)
def test_the_dot_product_instruction_gives_the_bits_of_fmas(kernels, size):
    """bf16, also where sums and inputs are denormal: flushed on every path, or they would part."""
    if not kernels.set_dot(True):
        pytest.skip("this CPU has no bf16 dot product, or it is not two FMAs")
    narrow = load("avx2")
    try:
        for n, k in ((49, 80), (33, 13), (7, 1), (96, 2049), (576, 576)):
            packed = kernels.pack_weight(rand(n, k, dtype=torch.bfloat16, std=size))
            x = rand(40, k, dtype=torch.bfloat16, std=size if size > 1e-30 else 1.0)
            for m in (1, 2, 3, 7, 12, 13, 40):
                kernels.set_dot(True)
                fast = kernels.linear(x[:m], packed)
                kernels.set_dot(False)
                assert same(kernels.linear(x[:m], packed), fast), (n, k, m)
                assert same(narrow.linear(x[:m], packed), fast), (n, k, m)
                wide = kernels.linear(x[:m].float(), packed)
                assert same(wide.bfloat16(), fast), (n, k, m)
    finally:
        kernels.set_dot(True)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_change_no_bit(kernels, threads):
    x, packed = rand(65, 576), kernels.pack_weight(rand(1003, 576, std=0.03))
    gate, weight = rand(65, 3072), rand(576)
    before = kernels.threads

    def everything() -> list[Tensor]:
        return [
            kernels.linear(x, packed),
            kernels.linear(x[:1], packed),
            kernels.rms_norm(x, weight, 1e-5),
            kernels.act_and_mul(gate, "silu"),
            kernels.log_softmax(gate),
        ]

    expected = everything()
    try:
        kernels.set_threads(threads)
        assert all(same(a, b) for a, b in zip(everything(), expected, strict=True))
    finally:
        kernels.set_threads(before)


def test_a_forked_child_and_two_callers_at_once_get_the_same_bits(kernels):
    x, packed = rand(64, 576), kernels.pack_weight(rand(1003, 576, std=0.03))
    expected = kernels.linear(x, packed)
    wanted = expected.numpy().tobytes()
    child = os.fork()
    if child == 0:  # helpers don't survive a fork; the child starts its own (torch's OpenMP hangs)
        os._exit(0 if kernels.linear(x, packed).numpy().tobytes() == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(kernels.linear, x[i : i + 1], packed) for i in range(64)]
        assert all(same(c.result()[0], expected[i]) for i, c in enumerate(calls))


def test_flush_to_zero_in_the_caller_changes_no_bit(kernels):
    x, packed = torch.full((3, 64), 1e-20), kernels.pack_weight(torch.full((40, 64), 1e-20))
    expected = kernels.linear(x, packed)
    assert (expected != 0).all()  # about 6e-39: a denormal number
    assert torch.set_flush_denormal(True)
    try:
        assert same(kernels.linear(x, packed), expected)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_keeps_every_number_in_place(kernels, shape, dtype):
    weight = rand(*shape, dtype=dtype)
    kept = weight.clone()
    packed = kernels.pack_weight(weight)
    assert packed.data.data_ptr() == weight.data_ptr() and packed.data.numel() == weight.numel()
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(3))
    assert same(kernels.take_rows(packed, order), kept[order])
    assert same(kernels.take_rows(packed, order[:6].view(2, 3)), kept[order[:6].view(2, 3)])
    transposed = kernels.pack_weight(kept.T.contiguous().T)
    assert same(transposed.data, packed.data)


def test_wrong_input_is_refused(kernels):
    packed = kernels.pack_weight(rand(16, 32))
    with pytest.raises(ValueError, match="31 columns"):
        kernels.linear(rand(2, 31), packed)
    with pytest.raises(IndexError, match=r"0\.\.15"):
        kernels.take_rows(packed, torch.tensor([16]))
    with pytest.raises(ValueError, match="multiples of 16"):
        kernels.attention(rand(1, 1, 24), rand(1, 1, 16, 48), *[torch.zeros(2, 1)] * 3, 1.0)
    with pytest.raises(TypeError, match="cache"):
        kernels.attention(rand(1, 1, 32), rand(1, 1, 16, 64).half(), *[torch.zeros(2, 1)] * 3, 1.0)


def test_the_row_check_sees_stock_and_planted_faults(kernels):
    """What the checks above are worth: torch's own linear fails them, and so does a sum whose cut
    depends on M.
    """
    weight, x = rand(576, 1536, std=0.03), rand(257, 1536)
    assert (
        first_row_that_moves(lambda rows: torch.nn.functional.linear(rows, weight), x) is not None
    )
    left = kernels.pack_weight(weight[:, :768].contiguous())
    right = kernels.pack_weight(weight[:, 768:].contiguous())
    whole = kernels.pack_weight(weight, inplace=False)

    def split_k_when_few(rows: Tensor) -> Tensor:
        if len(rows) >= 16:
            return kernels.linear(rows, whole)
        return kernels.linear(rows[:, :768], left) + kernels.linear(rows[:, 768:], right)

    assert first_row_that_moves(split_k_when_few, x) == "1 rows from row 0"


# -- rows ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [576, 64, 80, 13, 1003])
def test_row_operations(kernels, each_isa, width, dtype):
    x, residual = rand(257, width, dtype=dtype), rand(257, width, dtype=dtype, seed=1)
    weight, bias = rand(width, dtype=dtype), rand(width, dtype=dtype, seed=2)
    exact, eps = x.double(), 1e-5
    rms = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
    mean = exact.mean(-1, keepdim=True)
    norm = (exact - mean) / ((exact - mean).square().mean(-1, keepdim=True) + eps).sqrt()
    summed = (x + residual).double()
    summed_rms = summed / (summed.square().mean(-1, keepdim=True) + eps).sqrt()
    cases = {
        "rms_norm": (lambda k, r: k.rms_norm(r, weight, eps), rms * weight.double()),
        "gemma": (lambda k, r: k.rms_norm(r, weight, eps, 1.0), rms * (weight.double() + 1)),
        "no weight": (lambda k, r: k.rms_norm(r, None, eps), rms),
        "layer_norm": (
            lambda k, r: k.layer_norm(r, weight, bias, eps),
            norm * weight.double() + bias.double(),
        ),
        "softmax": (lambda k, r: k.softmax(r), exact.softmax(-1)),
        "log_softmax": (lambda k, r: k.log_softmax(r), exact.log_softmax(-1)),
        "sum": (lambda k, r: k.sum(r, keepdim=True), exact.sum(-1, keepdim=True)),
        "mean": (lambda k, r: k.mean(r, keepdim=True), mean),
    }
    for name, (op, want) in cases.items():
        got = op(kernels, x)
        assert first_row_that_moves(lambda r, op=op: op(each_isa, r), x, ROWS[::4]) is None, name
        assert same(op(each_isa, x), got), f"{name}: instruction sets disagree"
        # one rounding of the output, and fp32 sums of `width` numbers of size about 1
        bound = EPS[got.dtype] * want.abs() * 1.01 + width * 2.0**-23 * (1 + want.abs())
        assert ((got.double() - want).abs() <= bound).all(), name
    y, total = each_isa.fused_add_rms_norm(x, residual, weight, eps)
    assert same(total, x + residual)
    assert same(y, kernels.rms_norm(x + residual, weight, eps))
    assert (
        (y.double() - summed_rms * weight.double()).abs() <= EPS[dtype] * 8 + width * 2.0**-22
    ).all()
    wide = rand(9, 4, width, dtype=dtype)
    heads = rand(9, 6, width, dtype=dtype)[:, 1:5]
    assert same(
        each_isa.rms_norm(heads, weight, eps), kernels.rms_norm(heads.contiguous(), weight, eps)
    )
    assert same(
        kernels.rms_norm(wide, weight, eps)[3, 2], kernels.rms_norm(wide[3, 2], weight, eps)
    )


def test_softmax_survives_extremes(kernels):
    x = torch.tensor([[0.0, -math.inf, 1e30, -1e30], [-math.inf, -5.0, -5.0, -math.inf]])
    assert torch.equal(kernels.softmax(x), torch.tensor([[0.0, 0, 1, 0], [0, 0.5, 0.5, 0]]))
    assert torch.isnan(kernels.softmax(torch.tensor([[1.0, math.nan, 2.0]]))).all()


GATED = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": None,
    "relu": torch.relu,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*GATED, "quick_gelu", "relu2", "sigmoid", "tanh"])
def test_activations(kernels, each_isa, kind, dtype):
    reference = (
        GATED.get(kind)
        or {
            "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
            "quick_gelu": lambda v: v * torch.sigmoid(1.702 * v),
            "relu2": lambda v: torch.relu(v).square(),
            "sigmoid": torch.sigmoid,
            "tanh": torch.tanh,
        }[kind]
    )
    x = rand(257, 2 * 77, dtype=dtype, std=3.0)
    plain, gated = reference(x.double()), reference(x[:, :77].double()) * x[:, 77:].double()
    for op, want in (
        (lambda k, r: k.act(r, kind), plain),
        (lambda k, r: k.act_and_mul(r, kind), gated),
    ):
        assert first_row_that_moves(lambda r, op=op: op(each_isa, r), x, ROWS[::4]) is None
        assert same(op(each_isa, x), op(kernels, x))
        # one rounding, and 2e-6 absolute for the polynomials under values up to about 10
        bound = EPS[dtype] * want.abs() * 1.01 + 2e-6 * (1 + x[:, :77].double().abs().max())
        assert ((op(kernels, x).double() - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head", "part", "neox"), [(64, 64, True), (80, 32, True), (128, 128, False), (96, 24, False)]
)
def test_rotary(kernels, each_isa, head, part, neox, dtype):
    tokens, hq, hk = 33, 3, 1
    angles = torch.arange(500.0)[:, None] * (10000.0 ** (-torch.arange(0, part, 2) / part))
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    positions = torch.randint(0, 500, (tokens,), generator=torch.Generator().manual_seed(1))
    qkv = rand(tokens, (hq + 2 * hk) * head, dtype=dtype)
    ours = qkv.clone()
    q, k, _ = ours.split([hq * head, hk * head, hk * head], -1)
    each_isa.rotary(positions, q, k, cache, head, part, neox)
    again = qkv.clone()
    q2, k2, v2 = again.split([hq * head, hk * head, hk * head], -1)
    for t in range(tokens):
        kernels.rotary(positions[t : t + 1], q2[t : t + 1], k2[t : t + 1], cache, head, part, neox)
    assert same(ours, again)
    assert same(v2, qkv[:, -hk * head :])
    x = qkv[:, : (hq + hk) * head].double().view(tokens, hq + hk, head)
    cos, sin = cache.double()[positions][:, None].chunk(2, -1)
    rot = x[..., :part]
    a, b = rot.chunk(2, -1) if neox else (rot[..., ::2], rot[..., 1::2])
    pair = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)
    want = torch.cat([rotated, x[..., part:]], -1)
    got = ours[:, : (hq + hk) * head].double().view(tokens, hq + hk, head)
    assert ((got - want).abs() <= EPS[dtype] * want.abs() * 1.01 + 1e-6).all()


# -- mixture of experts ----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moe(kernels, each_isa, dtype):
    experts, slots, h, mid, m = 8, 3, 80, 48, 65
    w13 = [rand(2 * mid, h, dtype=dtype, std=0.1, seed=e) for e in range(experts)]
    w2 = [rand(h, mid, dtype=dtype, std=0.1, seed=50 + e) for e in range(experts)]
    up = [kernels.pack_weight(w, inplace=False) for w in w13]
    down = [kernels.pack_weight(w, inplace=False) for w in w2]
    x = rand(m, h, dtype=dtype)
    gen = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(experts, generator=gen)[:slots] for _ in range(m)]).int()
    weights = torch.rand(m, slots, generator=gen)
    both = torch.cat([x.float(), weights, ids.float()], -1)

    def op(k, rows: Tensor) -> Tensor:
        return k.moe(
            rows[:, :h].to(dtype),
            up,
            down,
            rows[:, h : h + slots],
            rows[:, h + slots :].int(),
            "silu",
        )

    assert first_row_that_moves(lambda r: op(each_isa, r), both, ROWS[:23]) is None
    assert same(op(each_isa, both), op(kernels, both))
    want = torch.zeros(m, h, dtype=torch.float64)
    for i in range(m):
        for s in range(slots):
            a = (x[i].double() @ w13[ids[i, s]].double().T).to(dtype).double()
            mixed = (torch.nn.functional.silu(a[:mid]) * a[mid:]).to(dtype).double()
            want[i] += weights[i, s].double() * (mixed @ w2[ids[i, s]].double().T)
    # two roundings of the middle values, and one of the output
    assert ((op(kernels, both).double() - want).abs() <= EPS[dtype] * (want.abs() + 4) + 1e-6).all()


# -- attention -------------------------------------------------------------------------------------
def sequences(kernels, lens, hq, hk, d, block, dtype):
    """Paged sequences in shuffled blocks of a cache that is NaN wherever nothing was written."""
    gen = torch.Generator().manual_seed(11)
    counts = [-(-n // block) for n in lens]
    cache = torch.full((sum(counts) + 2, hk, block, 2 * d), math.nan, dtype=dtype)
    free = torch.randperm(len(cache), generator=gen).tolist()
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    found = SimpleNamespace(q=[], k=[], v=[], lens=lens, cache=cache, table=table)
    for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
        table[i, :count] = torch.tensor([free.pop() for _ in range(count)])
        for name, heads in (("q", hq), ("k", hk), ("v", hk)):
            getattr(found, name).append(rand(n, heads, d, dtype=dtype, seed=31 * i + ord(name)))
        pos = torch.arange(n)
        slots = table[i][pos // block].long() * block + pos % block
        kernels.reshape_and_cache(found.k[-1], found.v[-1], cache, slots)
    return found


def attend(
    kernels, seqs, queries: list[int], which: list[int] | None = None, upto=None, **options
) -> list[Tensor]:
    """The last `queries[i]` tokens of sequences cut to `upto`, together in one call."""
    which = list(range(len(seqs.lens))) if which is None else which
    ends = [upto or seqs.lens[i] for i in which]
    q = torch.cat([seqs.q[i][e - n : e] for i, e, n in zip(which, ends, queries, strict=True)])
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    scale = q.shape[-1] ** -0.5
    lens = torch.tensor(ends, dtype=torch.int32)
    return list(
        kernels.attention(q, seqs.cache, seqs.table[which], starts, lens, scale, **options).split(
            queries
        )
    )


ATTENTION = {
    "gqa": ({"lens": [1, 17, 64, 130, 700], "hq": 9, "hk": 3, "d": 64, "block": 16}, {}),
    "window": ({"lens": [5, 65, 600], "hq": 4, "hk": 4, "d": 80, "block": 32}, {"window": 100}),
    "softcap": ({"lens": [65, 513], "hq": 8, "hk": 1, "d": 128, "block": 128}, {"softcap": 30.0}),
    "alibi and sinks": (
        {"lens": [33, 300], "hq": 4, "hk": 2, "d": 96, "block": 16},
        {"alibi": True, "sinks": True},
    ),
    "wide, window, sinks": (
        {"lens": [33, 300], "hq": 2, "hk": 2, "d": 256, "block": 48},
        {"window": 17, "sinks": True},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(kernels, each_isa, case, dtype):
    shape, wanted = ATTENTION[case]
    seqs = sequences(kernels, dtype=dtype, **shape)
    hq = shape["hq"]
    options = {k: v for k, v in wanted.items() if k in ("window", "softcap")}
    if wanted.get("alibi"):
        options["alibi_slopes"] = 2.0 ** -torch.arange(1.0, hq + 1)
    if wanted.get("sinks"):
        options["sinks"] = rand(hq, seed=9)
    lens, everyone = seqs.lens, range(len(seqs.lens))
    full = attend(kernels, seqs, lens, **options)
    for i in everyone:
        bound = 4 * EPS[dtype] + 2e-5 if dtype == torch.float32 else 4 * EPS[dtype]
        assert ((full[i].double() - exact_attention(seqs, i, options)).abs() <= bound).all()
    # decode, chunks, alone or together, on every instruction set: the same bits at the same
    # position
    for got, size in (
        (attend(each_isa, seqs, lens, **options), lens),
        (attend(each_isa, seqs, [1] * len(lens), **options), [1] * len(lens)),
        (
            attend(each_isa, seqs, [max(1, n // 3) for n in lens], **options),
            [max(1, n // 3) for n in lens],
        ),
    ):
        assert all(same(got[i], full[i][-size[i] :]) for i in everyone)
    longest = max(everyone, key=lambda i: lens[i])
    assert same(attend(each_isa, seqs, [lens[longest]], [longest], **options)[0], full[longest])
    for end in (1, 15, 16, 17, 63, 64, 65, 255, 256, 257):
        if end <= lens[longest]:
            (one,) = attend(each_isa, seqs, [1], [longest], upto=end, **options)
            assert same(one[0], full[longest][end - 1]), f"decode at position {end - 1}"
            (part,) = attend(each_isa, seqs, [min(end, 40)], [longest], upto=end, **options)
            assert same(part, full[longest][end - min(end, 40) : end]), f"chunk that ends at {end}"


def exact_attention(seqs, i: int, options) -> Tensor:
    q, k, v = (getattr(seqs, name)[i].double() for name in "qkv")
    n, hq, d = q.shape
    k, v = (x.repeat_interleave(hq // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    ahead = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    if "alibi_slopes" in options:
        scores = scores + options["alibi_slopes"].double()[:, None, None] * ahead
    hidden = ahead > 0
    if options.get("window"):
        hidden = hidden | (ahead <= -options["window"])
    scores = scores.masked_fill(hidden, -math.inf)
    if "sinks" in options:
        scores = torch.cat([scores, options["sinks"].double()[:, None, None].expand(-1, n, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v)


def test_attention_ignores_threads_and_block_size(kernels):
    shape = {"lens": [700, 300], "hq": 6, "hk": 2, "d": 64, "dtype": torch.bfloat16}
    small, large = sequences(kernels, block=16, **shape), sequences(kernels, block=256, **shape)
    before = kernels.threads
    expected = attend(kernels, small, [700, 300])
    try:
        for threads in (1, 2, 4):
            kernels.set_threads(threads)
            for seqs in (small, large):
                got = attend(kernels, seqs, [700, 300])
                assert all(same(a, b) for a, b in zip(got, expected, strict=True))
                one = attend(
                    kernels, seqs, [1], [0]
                )  # the splits of a lone sequence go to all threads
                assert same(one[0][0], expected[0][-1])
    finally:
        kernels.set_threads(before)


def test_attention_check_sees_a_split_that_depends_on_the_batch(kernels):
    """Planted fault: keys of a lone decode cut in two halves and merged, as a batch-dependent split
    would.
    """
    seqs = sequences(kernels, [700], 4, 2, 64, 16, torch.float32)
    whole = attend(kernels, seqs, [700])[0][-1]
    q, k, v = seqs.q[0][-1].double(), seqs.k[0].double(), seqs.v[0].double()
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (torch.einsum("hd,khd->hk", q, k) * 64**-0.5).float()
    top = scores.max(-1, keepdim=True).values
    parts = [((scores[:, s] - top).exp(), v[s].float()) for s in (slice(0, 333), slice(333, 700))]
    total = sum(w.sum(-1, keepdim=True) for w, _ in parts)
    halves = sum(torch.einsum("hk,khd->hd", w, x) for w, x in parts) / total
    assert torch.allclose(halves, whole, atol=1e-5) and not same(halves, whole)


def test_slots_that_are_negative_are_skipped(kernels):
    cache = torch.zeros(2, 1, 16, 32)
    key, value = rand(3, 1, 16), rand(3, 1, 16, seed=1)
    kernels.reshape_and_cache(key, value, cache, torch.tensor([-1, 17, -1]))
    flat = cache[1, 0].flatten()
    assert not cache[0].any()
    assert same(flat[:256].view(16, 16)[:, 1], key[1, 0])  # keys: [16 dimensions][16 keys]
    assert same(flat[256:].view(16, 16)[1], value[1, 0])
    assert int((cache != 0).sum()) == 32


# -- a whole layer ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", ["llama", "qwen3", "qwen2", "plain"])
def test_decoder_layer_equals_its_steps(kernels, each_isa, style, dtype):
    h, hq, hk, d, mid, block, lens, news = 96, 6, 2, 32, 80, 16, [40, 3, 300], [40, 1, 7]
    gated = style != "plain"
    wide = (hq + 2 * hk) * d
    sizes = ((wide, h), (h, hq * d), (2 * mid if gated else mid, h), (h, mid))
    qkv, o, up, down = (kernels.pack_weight(rand(*s, dtype=dtype, std=0.1)) for s in sizes)
    norm_in, norm_post = rand(h, dtype=dtype), rand(h, dtype=dtype, seed=1)
    bias = rand(wide, dtype=dtype) if style == "qwen2" else None
    q_norm, k_norm = (
        (rand(d, dtype=dtype, seed=s) for s in (2, 3)) if style == "qwen3" else (None, None)
    )
    angles = torch.arange(400.0)[:, None] * (1e4 ** (-torch.arange(0, d, 2) / d))
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1) if gated else None
    plan = each_isa.layer_plan(
        qkv=qkv,
        o=o,
        gate_up=up,
        down=down,
        input_norm=norm_in,
        post_norm=norm_post,
        eps=1e-5,
        q_heads=hq,
        kv_heads=hk,
        head_size=d,
        scale=d**-0.5,
        activation="silu",
        qkv_bias=bias,
        q_norm=q_norm,
        k_norm=k_norm,
        cos_sin_cache=cos_sin,
        rotary_dim=d,
    )
    counts = [-(-n // block) for n in lens]
    table = torch.zeros(3, max(counts), dtype=torch.int32)
    for i, c in enumerate(counts):
        table[i, :c] = torch.arange(sum(counts[:i]), sum(counts[: i + 1]))
    past = rand(sum(counts), hk, block, 2 * d, dtype=dtype)
    positions = torch.cat([torch.arange(n - m, n) for n, m in zip(lens, news, strict=True)])
    owner = torch.arange(3).repeat_interleave(torch.tensor(news))
    slots = table[owner, positions // block].long() * block + positions % block
    starts, ends = torch.tensor([0, *news]).cumsum(0).int(), torch.tensor(lens, dtype=torch.int32)
    x, res = rand(len(positions), h, dtype=dtype), rand(len(positions), h, dtype=dtype, seed=1)

    def steps(k, hidden, residual, cache):
        if residual is None:
            y, residual = k.rms_norm(hidden, norm_in, 1e-5), hidden
        else:
            y, residual = k.fused_add_rms_norm(hidden, residual, norm_in, 1e-5)
        q, key, value = k.linear(y, qkv, bias).split([hq * d, hk * d, hk * d], -1)
        if q_norm is not None:
            q = k.rms_norm(q.view(-1, hq, d), q_norm, 1e-5).view(-1, hq * d)
            key = k.rms_norm(key.view(-1, hk, d), k_norm, 1e-5).view(-1, hk * d)
        if cos_sin is not None:
            k.rotary(positions, q, key, cos_sin, d, d)
        k.reshape_and_cache(key.view(-1, hk, d), value.view(-1, hk, d), cache, slots)
        seen = k.attention(q.view(-1, hq, d), cache, table, starts, ends, d**-0.5)
        y, residual = k.fused_add_rms_norm(k.linear(seen.flatten(1), o), residual, norm_post, 1e-5)
        y = k.linear(y, up)
        return k.linear(k.act_and_mul(y, "silu") if gated else k.act(y, "silu"), down), residual

    for residual in (None, res):
        cache, other = past.clone(), past.clone()
        got = each_isa.decoder_layer(
            plan, x, residual, positions, cache, table, starts, ends, slots
        )
        want = steps(kernels, x, residual, other)
        assert all(same(a, b) for a, b in zip(got, want, strict=True))
        assert same(cache, other)
        padded = torch.cat([x, rand(5, h, dtype=dtype, seed=8)])
        more = torch.cat([positions, torch.zeros(5, dtype=torch.int64)])
        extra = None if residual is None else torch.cat([residual, rand(5, h, dtype=dtype)])
        wider = each_isa.decoder_layer(plan, padded, extra, more, cache, table, starts, ends, slots)
        assert all(same(a[: len(x)], b) for a, b in zip(wider, want, strict=True))


def test_layer_plan_refuses_what_does_not_fit(kernels):
    p = kernels.pack_weight(rand(96, 32))
    norm = torch.ones(32)
    with pytest.raises(ValueError, match="layer_plan: qkv"):
        kernels.layer_plan(
            qkv=p,
            o=p,
            gate_up=p,
            down=p,
            input_norm=norm,
            post_norm=norm,
            eps=1e-5,
            q_heads=2,
            kv_heads=2,
            head_size=32,
            scale=1.0,
            activation="silu",
        )


# -- building --------------------------------------------------------------------------------------
def test_no_compiler_means_the_fallback_with_a_reason(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    load.cache_clear()
    try:
        loaded = load()
        assert loaded.name == "torch" and "install g++" in loaded.reason
        with pytest.raises(build.NoCompiler):
            load(_native()[0])
    finally:
        load.cache_clear()


def test_a_failed_build_says_why_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(build.ISA_FLAGS, _native()[0], ["-march=no-such-thing"])
    with pytest.raises(build.NoCompiler, match="no-such-thing"):
        build.build(_native()[0], tmp_path)
    assert not list(tmp_path.glob("*.so"))


def test_avx512_avx2_and_aarch64_print_the_same_hashes(tmp_path):
    """Every kernel as one program for each instruction set; AArch64 runs in an emulator if there is
    one.
    """
    cross = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    printed = {}
    for isa in dict.fromkeys([*_native(), "neon"]):
        compiler, runner = build.find_compiler(), []
        if isa == "neon" and build.machine_isa() != "neon":
            if not all(cross):
                continue
            compiler, runner = cross[0], [cross[1]]
        flags = [f for f in build.FLAGS if f not in ("-shared", "-fvisibility=hidden")]
        flags += [*build.ISA_FLAGS[isa], "-static", "-I", str(build.SOURCES)]
        source, program = Path(__file__).with_name("kernels_isa.cpp"), tmp_path / isa
        subprocess.run([compiler, *flags, source, "-o", program], check=True)
        done = subprocess.run([*runner, program], check=True, capture_output=True, text=True)
        printed[isa] = done.stdout.splitlines()
    assert printed
    first, *others = printed
    assert len(printed[first]) > 80
    for other in others:
        pairs = zip(printed[first], printed[other], strict=True)
        apart = [f"{a} | {b}" for a, b in pairs if a != b]
        assert not apart, f"{first} and {other} differ: {apart[:5]}"
