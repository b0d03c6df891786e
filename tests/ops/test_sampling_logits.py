"""What options do to logits: one row, nothing left behind; and logprobs nobody else can move."""

from __future__ import annotations

import pytest
import torch

from ops import sampling_logits, sampling_logprobs
from ops.kernels.cpu import draw as native
from ops.sampling_logits import Edits

VOCAB = 200


def _rows(n: int) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(5)) * 2


EDITS = [
    Edits(),
    Edits(allowed=[3, 3, 7, 199, 5000]),
    Edits(banned=[0, 1, 2, 9999, -1]),
    Edits(bias=((4, 3.5), (5, -100.0), (7777, 1.0))),
    Edits(repetition=1.2, prompt=[1, 2, 3], answer=[4, 4, 5]),
    Edits(frequency=0.3, presence=-0.7, prompt=[1], answer=[4, 4, 5, -1]),
    Edits(allowed=[1, 4], banned=[4], bias=((1, 1.0),), frequency=1.0, answer=[1, 1]),
]


def test_a_row_never_sees_its_neighbours() -> None:
    x = _rows(len(EDITS))
    alone = torch.cat(
        [sampling_logits.apply(x[i : i + 1].clone(), [e]) for i, e in enumerate(EDITS)]
    )
    together = sampling_logits.apply(x.clone(), EDITS)
    backwards = sampling_logits.apply(x.flip(0).clone(), EDITS[::-1]).flip(0)
    assert torch.equal(together, alone)
    assert torch.equal(backwards, alone)
    assert torch.equal(together[0], x[0])
    for row in range(1, len(EDITS)):
        assert not torch.equal(together[row], x[row])


def test_nothing_stays_for_the_next_owner_of_a_row() -> None:
    x = _rows(1)
    for edit in EDITS:
        sampling_logits.apply(x.clone(), [edit])
        assert torch.equal(sampling_logits.apply(x.clone(), [Edits()]), x)


def test_values() -> None:
    x = _rows(1)
    got = sampling_logits.apply(x.clone(), [EDITS[1]])[0]
    assert set(torch.isfinite(got).nonzero().flatten().tolist()) == {3, 7, 199}
    got = sampling_logits.apply(x.clone(), [EDITS[4]])[0]
    for v in (1, 2, 3, 4, 5):
        want = x[0, v] / 1.2 if x[0, v] > 0 else x[0, v] * 1.2
        assert torch.equal(got[v], want.to(torch.float32))
    got = sampling_logits.apply(x.clone(), [EDITS[5]])[0]
    assert torch.allclose(got[4], x[0, 4] - 0.3 * 2 + 0.7, atol=1e-6)
    assert torch.equal(got[1], x[0, 1])  # the prompt doesn't count for these two
    got = sampling_logits.apply(x.clone(), [EDITS[6]])[0]
    assert torch.isfinite(got).nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize(
    ("answer", "ends"),
    [([], [9]), ([1], [9, 2]), ([1, 2], [9, 3]), ([2, 1, 2], [9, 3]), ([1, 2, 1], [9, 2])],
)
def test_bad_words(answer: list[int], ends: list[int]) -> None:
    assert sampling_logits.bad_word_ends([[9], [1, 2], [1, 2, 3]], answer) == ends


def test_logprobs_depend_on_neither_k_nor_neighbours() -> None:
    x = (torch.randn(40, 3000, generator=torch.Generator().manual_seed(6)) * 8).round() / 4
    full = sampling_logprobs.log_softmax(x)
    token = torch.arange(40) * 70
    ids, values, rank = sampling_logprobs.gather(full, 50, token)
    for k in (0, 1, 5, 49):
        i, v, r = sampling_logprobs.gather(full, k, token)
        assert torch.equal(i, ids[:, : k + 1])
        assert torch.equal(v, values[:, : k + 1])
        assert torch.equal(r, rank)
    for row in range(40):
        one = sampling_logprobs.log_softmax(x[row : row + 1])
        assert torch.equal(one[0], full[row])
        i, v, r = sampling_logprobs.gather(one, 50, token[row : row + 1])
        assert torch.equal(i[0], ids[row])
        assert torch.equal(v[0], values[row])
        assert int(r) == int(rank[row])
    # Ties: by token id; and the rank is the place in that order.
    order = sorted(range(3000), key=lambda j: (-float(full[7, j]), j))
    assert ids[7, 1:].tolist() == order[:50]
    assert int(rank[7]) == order.index(int(token[7])) + 1


def test_compiled_top_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.randn(9, 1111, generator=torch.Generator().manual_seed(8)) * 4).round() / 2
    token = torch.arange(9) * 100
    fast = sampling_logprobs.gather(x, 30, token)
    monkeypatch.setattr(native, "load", lambda: None)
    plain = sampling_logprobs.gather(x, 30, token)
    for a, b in zip(fast, plain, strict=True):
        assert torch.equal(a, b)


def test_named_tokens() -> None:
    x = sampling_logprobs.log_softmax(_rows(3))
    ids, values, rank = sampling_logprobs.named(x, {1: [5, 6]}, torch.tensor([7, 8, 9]))
    assert ids.tolist() == [[7, 0, 0], [8, 5, 6], [9, 0, 0]]
    assert torch.equal(values[1], x[1, [8, 5, 6]])
    assert values[0, 1:].tolist() == [-torch.inf] * 2
    assert rank.tolist() == sampling_logprobs.gather(x, 0, torch.tensor([7, 8, 9]))[2].tolist()
