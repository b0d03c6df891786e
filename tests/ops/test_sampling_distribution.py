"""Whether the draw has the right distribution: chi-square against exact probabilities, and streams
that know nothing of each other.

The seeds are fixed, so each test always gives the same verdict. ALARM is the chance that a right
sampler with other constants would fail one check; there are about 40, so 1 in 25,000 over the file.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from ops import sampling, sampling_logits

ALARM = 1e-6
N = 40000
VOCAB = 61


def _logits() -> torch.Tensor:
    g = torch.Generator().manual_seed(11)
    return torch.randn(VOCAB, generator=g) * 1.5


def _tokens(
    logits: torch.Tensor,
    t: float = 1.0,
    k: int = 0,
    p: float = 1.0,
    m: float = 0.0,
    *,
    over: str = "seed",
) -> np.ndarray:
    """N draws of one distribution: over seeds, over choices or over positions."""
    count = np.arange(N)
    zero = np.zeros(N, dtype=np.int64)
    seed = count - N // 2 if over == "seed" else zero + 1234567
    choice = count if over == "choice" else zero
    position = count if over == "position" else zero + 3
    full = [np.full(N, v) for v in (t, k, p, m)]
    return sampling.draw(logits.repeat(N, 1), *full, seed, choice, position).numpy()


def _exact(logits: torch.Tensor, t: float, k: int, p: float, m: float) -> np.ndarray:
    """The probabilities that the options mean, in float64: min_p, then top_k, then top_p."""
    x = logits.double().numpy() / t
    prob = np.exp(x - x.max())
    prob /= prob.sum()
    order = np.argsort(-prob, kind="stable")
    order = order[prob[order] >= m * prob.max()]
    order = order[: k or None]
    share = np.cumsum(prob[order]) / prob[order].sum()
    order = order[: int(np.searchsorted(share, p - 1e-12)) + 1]
    out = np.zeros_like(prob)
    out[order] = prob[order] / prob[order].sum()
    return out


def _p_value(tokens: np.ndarray, prob: np.ndarray) -> float:
    """Chi-square over tokens expected at least five times; the rest share one bin. 0 if a token
    came that can't."""
    seen = np.bincount(tokens, minlength=prob.size).astype(float)
    if seen[prob == 0].any():
        return 0.0
    often = prob * tokens.size >= 5
    seen = np.append(seen[often], seen[~often].sum())
    want = np.append(prob[often], prob[~often].sum()) * tokens.size
    if want[-1] < 5:
        seen, want = np.append(seen[:-2], seen[-2:].sum()), np.append(want[:-2], want[-2:].sum())
    if want.size == 1:
        return 1.0
    return float(stats.chisquare(seen, want * seen.sum() / want.sum()).pvalue)


OPTIONS = [
    {}, {"t": 0.3}, {"t": 0.7}, {"t": 3.0}, {"k": 1}, {"k": 5}, {"k": 20}, {"p": 0.5}, {"p": 0.9},
    {"p": 0.99}, {"m": 0.05}, {"m": 0.3}, {"k": 10, "p": 0.8}, {"t": 0.8, "k": 30, "p": 0.95},
    {"t": 1.7, "p": 0.7, "m": 0.02}, {"t": 0.6, "k": 7, "p": 0.9, "m": 0.01},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_distribution(options: dict[str, float]) -> None:
    x = _logits()
    full = {"t": 1.0, "k": 0, "p": 1.0, "m": 0.0} | options
    assert _p_value(_tokens(x, **full), _exact(x, **full)) > ALARM


@pytest.mark.parametrize("over", ["choice", "position"])
def test_distribution_over_choices_and_positions(over: str) -> None:
    x = _logits()
    assert _p_value(_tokens(x, over=over), _exact(x, 1.0, 0, 1.0, 0.0)) > ALARM


def test_a_flat_distribution_over_a_large_vocabulary() -> None:
    """20,000 draws from 32,000 equal tokens: no corner of the vocabulary is preferred."""
    vocab, n = 32000, 20000
    zero = np.zeros(n, dtype=np.int64)
    x = torch.zeros(1, vocab).expand(n, vocab)
    got = np.concatenate(
        [
            sampling.draw(x[i : i + 2000], *([v] * 2000 for v in (1.0, 0, 1.0, 0.0)),
                          np.arange(i, i + 2000), zero[:2000], zero[:2000]).numpy()
            for i in range(0, n, 2000)
        ]
    )  # fmt: skip
    for bins in (got // 1000, got % 64, got % 16, got // 16 % 4):
        seen = np.bincount(bins)
        assert stats.chisquare(seen).pvalue > ALARM


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        ({"repetition": 1.3, "prompt": [1, 2, 3], "answer": [4, 4, 5]}, "repetition"),
        ({"frequency": 0.5, "answer": [4, 4, 5, 7, 7, 7]}, "frequency"),
        ({"presence": 1.0, "answer": [4, 4, 5], "prompt": [6]}, "presence"),
        ({"bias": ((0, 2.0), (9, -3.0))}, "bias"),
        ({"allowed": [3, 5, 9, 11]}, "allowed"),
    ],
)
def test_distribution_with_penalties(edit: dict, change: str) -> None:
    x = _logits()
    want = x.double().numpy().copy()
    answer, prompt = edit.get("answer", []), edit.get("prompt", [])
    if change == "repetition":
        for v in {*answer, *prompt}:
            want[v] = want[v] / 1.3 if want[v] > 0 else want[v] * 1.3
    for v in set(answer):
        if change == "frequency":
            want[v] -= 0.5 * answer.count(v)
        if change == "presence":
            want[v] -= 1.0
    for v, b in edit.get("bias", ()):
        want[v] += b
    if change == "allowed":
        want[[v for v in range(VOCAB) if v not in edit["allowed"]]] = -np.inf
    edited = sampling_logits.apply(x.clone()[None], [sampling_logits.Edits(**edit)])[0]
    prob = np.exp(want - want.max())
    tokens = _tokens(edited)
    assert _p_value(tokens, prob / prob.sum()) > ALARM
    assert _p_value(_tokens(x), prob / prob.sum()) < ALARM  # the penalty is what this test sees


def test_the_chi_square_sees_small_faults() -> None:
    """Planted: a temperature 4 % off, top_p off by one token, one token 15 % too likely."""
    x = _logits()
    exact = _exact(x, 1.0, 0, 1.0, 0.0)
    assert _p_value(_tokens(x, t=1.04), exact) < ALARM
    assert _p_value(_tokens(x, p=0.9), _exact(x, 1.0, 0, 0.88, 0.0)) < ALARM
    likely = int(x.argmax())
    assert _p_value(_tokens(x + torch.eye(VOCAB)[likely] * 0.14), exact) < ALARM


def _independent(a: np.ndarray, b: np.ndarray) -> float:
    """p-value that two sequences of tokens know nothing of each other (4 x 4 classes)."""
    edges = np.quantile(np.concatenate([a, b]), [0.25, 0.5, 0.75])
    table = np.zeros((4, 4))
    np.add.at(table, (np.searchsorted(edges, a), np.searchsorted(edges, b)), 1)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    return float(stats.chi2_contingency(table).pvalue)


def test_neighbouring_streams_are_independent() -> None:
    """Seeds s and s + 1, choices i and i + 1, positions p and p + 1, and choice i of s against
    choice 0 of s + i."""
    x = _logits()
    for over in ("seed", "choice", "position"):
        tokens = _tokens(x, over=over)
        for lag in (1, 2, 64):
            assert _independent(tokens[:-lag], tokens[lag:]) > ALARM, (over, lag)
    by_choice, by_seed = _tokens(x, over="choice"), _tokens(x, over="seed")
    assert _independent(by_choice, by_seed) > ALARM
    assert _independent(by_seed, by_seed) < ALARM  # the test can fail


def test_words_are_uncorrelated() -> None:
    """Correlation of the uniforms of 20,000 tokens between streams: within 4.9 standard errors."""
    n = 20000
    base = (42, 0, 0)
    others = [(43, 0, 0), (42, 1, 0), (42, 0, 1), (-42, 0, 0), (42 + 2**32, 0, 0), (0, 42, 0)]

    def uniform(key: tuple[int, int, int]) -> np.ndarray:
        return sampling.words(*(torch.tensor([k]) for k in key), n)[0].double().numpy()

    u = uniform(base)
    for other in others:
        r = np.corrcoef(u, uniform(other))[0, 1]
        assert abs(r) < 4.9 / np.sqrt(n), other
    for lag in (1, 16, 64):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4.9 / np.sqrt(n), lag
    assert stats.kstest(u / 2**32, "uniform").pvalue > ALARM
