"""The draw: published vectors, golden values, an independent form, and every fast form."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from ops import sampling, sampling_check
from ops.kernels.cpu import draw as native
from ops.registry import NotInvariant
from tests.ops import draw_by_hand

ISAS = ["avx512", "avx2", "neon"]


def _native(isa: str) -> native.Draw:
    from ops.kernels.cpu import build

    best = build.machine_isa()
    if best is None or ISAS.index(isa) < ISAS.index(best) or (isa == "neon") != (best == "neon"):
        pytest.skip(f"this machine has no {isa}")
    found = native.load(isa)
    assert found is not None
    return found


# Random123 1.14, tests/kat_vectors: philox4x32, 10 rounds. counter, key, result.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], want: list[int]) -> None:
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    k0, k1 = (torch.tensor([k]) for k in key)
    assert [int(w) for w in sampling.philox((c0, c1, c2, c3), (k0, k1))] == want
    assert draw_by_hand.philox(counter, key) == want


def _golden_logits() -> torch.Tensor:
    """[3, 1000], exactly representable, from integers alone: no generator, no library function."""
    i = torch.arange(3000, dtype=torch.int64)
    return ((i * 2654435761 % 4093).to(torch.float32) / 512 - 4).view(3, 1000)


# (temperature, top_k, top_p, min_p, seed, choice, position) -> a token for each row of
# _golden_logits.
GOLDEN: list[tuple[tuple[float, int, float, float, int, int, int], list[int]]] = [
    ((1.0, 0, 1.0, 0.0, 0, 0, 0), [134, 134, 781]),
    ((1.0, 0, 1.0, 0.0, 42, 0, 0), [876, 45, 92]),
    ((1.0, 0, 1.0, 0.0, 42, 1, 0), [871, 840, 367]),
    ((1.0, 0, 1.0, 0.0, 43, 0, 0), [969, 171, 521]),
    ((1.0, 0, 1.0, 0.0, 42, 0, 1), [324, 696, 400]),
    ((0.7, 40, 1.0, 0.0, -1, 0, 7), [969, 345, 203]),
    ((1.5, 0, 0.9, 0.0, 2**63 - 1, 3, 1000), [265, 267, 267]),
    ((1.0, 0, 1.0, 0.25, -(2**63), 0, 2**32 - 1), [752, 7, 907]),
    ((0.8, 50, 0.95, 0.05, 7, 2, 11), [583, 933, 203]),
    ((1e-3, 0, 1.0, 0.0, 7, 0, 0), [323, 292, 208]),
    ((0.0, 5, 0.5, 0.5, 7, 0, 0), [323, 292, 208]),
]


@pytest.mark.parametrize(("options", "want"), GOLDEN)
def test_golden_tokens(options: tuple[float, ...], want: list[int]) -> None:
    """Committed values: if this fails, the draw has changed and SAMPLER needs the next number."""
    args = [[o] * 3 for o in options]
    x = _golden_logits()
    assert sampling.draw_rows(x, sampling.rows(*args)).tolist() == want
    assert sampling.draw(x, *args).tolist() == want
    assert [draw_by_hand.draw(row, *options) for row in x.tolist()] == want


def test_golden_words_and_noise() -> None:
    one = [torch.tensor([v]) for v in (42, 0, 0)]
    w = sampling.words(*one, 100)[0]
    assert [int(w[v]) for v in (0, 1, 16, 63, 64, 99)] == [
        541301508,
        528846114,
        2550652962,
        3422055386,
        1933504825,
        2058181293,
    ]
    assert sampling.gumbel(w[:4]).view(torch.int32).tolist() == [
        1073761215,
        1073865648,
        1073716568,
        -1087723205,
    ]
    assert sampling.SAMPLER == "samebits-philox-gumbel/1"


def _awkward(rows: int, vocab: int, seed: int) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Logits with ties, -inf, +inf, NaN and both zeros; options at their edges."""
    g, r = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    x = torch.randn(rows, vocab, generator=g) * torch.tensor([0.0, 0.5, 3.0, 20.0])[seed % 4]
    if seed % 2:
        x = (x * 2).round() / 2
    if vocab > 20:
        x[:, ::7] = -torch.inf
        x[0], x[1] = -torch.inf, torch.nan
        x[2, 5] = torch.nan
        x[3, 3] = x[3, 9] = torch.inf
        x[4, ::2], x[4, 1::2] = -0.0, 0.0
    return x, [
        r.choice([0, 1e-6, 1e-5, 1e-3, 0.3, 1, 2, 100], rows),
        r.choice([0, 0, 1, 2, 5, 40, 1000, vocab, vocab + 9], rows),
        r.choice([1, 1, 0.9, 0.5, 0.01, 1e-9, 0.999], rows),
        r.choice([0, 0, 0.1, 1e-4, 1, 1e-12], rows),
        r.integers(-(2**63), 2**63 - 1, rows),
        r.integers(0, 9, rows),
        r.integers(0, 2**32, rows),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_by_hand(seed: int) -> None:
    x, args = _awkward(12, (30, 65, 128, 150)[seed % 4], seed)
    got = sampling.draw_rows(x, sampling.rows(*args)).tolist()
    for i, row in enumerate(x.tolist()):
        options = [a[i].item() for a in args]
        assert draw_by_hand.draw(row, *options) == got[i], (i, options)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1000, 1999, 20000])
def test_native_is_the_definition(isa: str, vocab: int) -> None:
    form = _native(isa)
    for seed in range(4):
        x, args = _awkward(48, vocab, seed)
        opts = sampling.rows(*args)
        assert torch.equal(form.draw(x, opts), sampling.draw_rows(x, opts)), seed


@pytest.mark.parametrize("isa", ISAS)
def test_native_steps(isa: str) -> None:
    """Noise and mass bit for bit; noise never above its bound; mass never rises as t falls."""
    form = _native(isa)
    g = torch.Generator().manual_seed(1)
    words = torch.randint(0, 2**32, (1 << 16,), generator=g)
    words[:5] = torch.tensor([0, 1, 2**30 - 1, 2**30, 2**32 - 1])
    t = -torch.rand(1 << 16, generator=g) * 23
    noise, bound, mass = form.steps(words, t)
    assert torch.equal(noise, sampling.gumbel(words))
    assert torch.equal(mass.to(torch.int64), sampling.mass(t))
    assert bool((bound >= noise).all())
    assert form.c.sb_draw_sweep_words(0, 1 << 22) == 0
    assert form.c.sb_draw_sweep_words(2**32 - (1 << 22), 2**32) == 0
    assert form.c.sb_draw_sweep_mass() == 0  # every float32 in [-22, 0]


def test_instruction_sets_draw_the_same(tmp_path: Path) -> None:
    """One program for each: AVX-512, AVX2, and AArch64 in an emulator where there is one."""
    from ops.kernels.cpu import build

    best, printed = build.machine_isa(), {}
    x86 = ["avx512", "avx2"] if best == "avx512" else ["avx2"] if best == "avx2" else []
    cross = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    for isa in [*x86, "neon"]:
        compiler, runner = build.find_compiler(), []
        if isa == "neon" and best != "neon":
            if not all(cross):
                continue
            compiler, runner = cross[0], [cross[1]]
        program = tmp_path / isa
        flags = [f for f in build.FLAGS if f not in ("-shared", "-fvisibility=hidden")]
        flags += [*build.ISA_FLAGS[isa], "-static", "-I", str(build.SOURCES)]
        source = Path(__file__).with_name("draw_isa.cpp")
        subprocess.run([compiler, *flags, source, "-o", program], check=True)
        printed[isa] = subprocess.run([*runner, program], check=True, capture_output=True).stdout
    assert printed
    assert len(set(printed.values())) == 1, sorted(printed)
    assert all(out.endswith(b" 0\n") for out in printed.values())


@pytest.mark.slow
def test_every_word_keeps_its_bound() -> None:
    form = native.load()
    assert form is not None
    assert form.c.sb_draw_sweep_words(0, 2**32) == 0


def test_noise_is_accurate() -> None:
    """Within 2e-6 of -log(-log(u)) in float64: the words 0, 1 and the last; a grid; random ones."""
    g = torch.Generator().manual_seed(2)
    w = torch.cat(
        [
            torch.tensor([0, 1, 2**32 - 1, 2**30, 2**30 - 1]),
            torch.arange(0, 2**32, 104729),
            torch.randint(0, 1 << 20, (10000,), generator=g),
        ]
    )
    exact = -torch.log(-torch.log1p(-(w.double() + 0.5) / 2**32))
    assert float((sampling.gumbel(w) - exact).abs().max()) < 2e-6
    assert float(sampling.gumbel(torch.tensor([0]))) <= sampling.MAX_NOISE


def test_a_row_is_alone_in_the_world() -> None:
    """Position in the batch, neighbours, strides and thread count change nothing."""
    x, args = _awkward(40, 3000, 3)
    want = sampling.draw(x, *args)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    shuffled = sampling.draw(x[order], *(a[order.numpy()] for a in args))
    assert torch.equal(shuffled, want[order])
    alone = [int(sampling.draw(x[i : i + 1], *(a[i : i + 1] for a in args))) for i in range(40)]
    assert alone == want.tolist()
    wide = torch.full((40, 3064), 99.0)
    wide[:, :3000] = x
    assert torch.equal(sampling.draw(wide[:, :3000], *args), want)


def test_logits_are_not_changed() -> None:
    x, args = _awkward(40, 3000, 3)
    before = x.clone()
    sampling.draw(x, *args)
    sampling.draw_rows(x, sampling.rows(*args))
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


def test_streams_never_meet() -> None:
    """(seed, choice, position) make different words; stock's rule, seed + choice, would not."""
    keys = [(s, c, p) for s in range(-8, 8) for c in range(8) for p in range(8)]
    s, c, p = (torch.tensor(k) for k in zip(*keys, strict=True))
    assert len(set(sampling.words(s, c, p, 4)[:, 0].tolist())) == len(keys)
    assert len({tuple(w) for w in sampling.words(s + c, c * 0, p, 4).tolist()}) < len(keys)
    low = torch.tensor([5, 5 + 2**32, 5 - 2**32])  # all 64 bits of the seed count
    assert len({tuple(w) for w in sampling.words(low, low * 0, low * 0, 4).tolist()}) == 3


def test_greedy_ignores_the_seed() -> None:
    x, _ = _awkward(64, 999, 1)
    first = [int(torch.nan_to_num(row, nan=-torch.inf).argmax()) for row in x]
    for seed in (0, 1, -5):
        for t in (0.0, 0.99e-5):
            got = sampling.draw(
                x, [t] * 64, [3] * 64, [0.5] * 64, [0.1] * 64, [seed] * 64, [1] * 64, [2] * 64
            )
            assert [a for a, row in zip(got.tolist(), x, strict=True) if row.max() < torch.inf] == [
                a for a, row in zip(first, x, strict=True) if row.max() < torch.inf
            ]


def test_temperature_is_used_as_given() -> None:
    """From MIN_TEMPERATURE up; 0.004 and 0.01 draw differently, where stock lifts both to 0.01."""
    x = (torch.arange(64) % 8).float().repeat(500, 1) * 0.01
    seeds, one = list(range(500)), [0] * 500

    def at(t: float) -> list[int]:
        return sampling.draw(x, [t] * 500, one, [1.0] * 500, one, seeds, one, one).tolist()

    assert at(0.004) != at(0.01)
    assert len(set(at(1.0001e-5))) == 8  # eight tokens tie for the largest logit
    assert set(at(0.9999e-5)) == {7}


def test_filters_under_ties() -> None:
    """One documented set: logit from high to low, then token id from low to high."""
    x = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0, 1.0]]).repeat(2000, 1)
    seeds, zero, one = list(range(2000)), [0] * 2000, [1.0] * 2000

    def support(k: int = 0, p: float = 1.0, m: float = 0.0) -> set[int]:
        got = sampling.draw(x, one, [k] * 2000, [p] * 2000, [m] * 2000, seeds, zero, zero)
        return set(got.tolist())

    assert support(k=2) == {1, 2}
    assert support(k=4) == {0, 1, 2, 4}
    assert support(k=5) == {0, 1, 2, 3, 4}
    assert support(m=0.3) == {0, 1, 2, 3, 4, 6}  # exp(-1) = 0.368 stays, all of its ties with it
    assert support(m=0.4) == {1, 2, 4}
    assert support(p=1e-9) == {1}
    mass = np.exp([2.0, 2, 2, 1, 1, 1, 0])
    order = [1, 2, 4, 0, 3, 6, 5]
    for n in range(1, 7):
        share = mass[:n].sum() / mass.sum()
        assert support(p=share - 1e-4) == set(order[:n])
        assert support(p=share + 1e-4) == set(order[: n + 1])
    # top_p looks at what top_k left: of three equal tokens, half of the mass is two of them.
    assert support(k=3, p=0.5) == {1, 2}


@pytest.mark.parametrize(
    ("name", "index", "bad"),
    [
        ("temperature", 0, -1.0), ("temperature", 0, float("nan")),
        ("temperature", 0, float("inf")),
        ("top_p", 2, 0.0), ("top_p", 2, 1.5), ("min_p", 3, -0.1), ("choice", 5, -1),
        ("position", 6, 2**32),
    ],
)  # fmt: skip
def test_out_of_range(name: str, index: int, bad: float) -> None:
    args: list[list[float]] = [[1.0], [0], [1.0], [0.0], [0], [0], [0]]
    args[index] = [bad]
    with pytest.raises(ValueError, match=name):
        sampling.rows(*args)


def test_check_finds_a_form_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling_check.check()
    right = sampling.draw

    def by_place(
        x: torch.Tensor, *args: list
    ) -> torch.Tensor:  # the row's place leaks into its seed
        seeds = [s + i for i, s in enumerate(args[4])]
        return right(x, *args[:4], seeds, *args[5:])

    monkeypatch.setattr(sampling, "draw", by_place)
    with pytest.raises(NotInvariant, match=r"vllm\.Sampler"):
        sampling_check.check()


WORKED = [
    ((1.0, 0, 1.0, 0.0, 42, 0, 0), 1),
    ((0.7, 3, 1.0, 0.0, -1, 1, 5), 3),
    ((1.5, 0, 0.8, 0.0, 2**63 - 1, 0, 1000), 3),
]


@pytest.mark.parametrize(("options", "token"), WORKED)
def test_worked_values_of_the_docs(options: tuple[float, ...], token: int) -> None:
    logits = [1.0, 2.5, 0.5, 2.5, -1.0, 0.0]
    assert draw_by_hand.draw(logits, *options) == token
    assert sampling.draw(torch.tensor([logits]), *([o] for o in options)).tolist() == [token]
