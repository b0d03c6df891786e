"""The draw on a GPU: the token ids of the definition on the host, whatever the launch."""

from __future__ import annotations

import pytest
import torch

from ops import sampling, sampling_check
from tests.ops.test_sampling import GOLDEN, _awkward, _golden_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


@pytest.mark.parametrize("vocab", [1, 65, 1000, 20000, 151936])
@pytest.mark.parametrize("seed", range(4))
def test_definition(vocab: int, seed: int) -> None:
    from ops.kernels.triton import draw

    x, args = _awkward(16, vocab, seed)
    opts = sampling.rows(*args)
    want = sampling.draw_rows(x, opts)
    on_gpu = x.cuda()
    assert torch.equal(sampling.draw_rows(on_gpu, opts).cpu(), want)  # torch's own ops there
    for lanes, programs, split in ((512, 1024, False), (128, 64, True), (1024, 1, False)):
        got = draw.draw(on_gpu, opts, lanes=lanes, programs=programs, split=split)
        assert torch.equal(got.cpu(), want), (lanes, programs)


def test_golden_tokens() -> None:
    x = _golden_logits().cuda()
    for options, want in GOLDEN:
        assert sampling.draw(x, *([o] * 3 for o in options)).tolist() == want, options


def test_large_batch_and_every_row_alone() -> None:
    x, args = _awkward(256, 50000, 2)
    on_gpu = x.cuda()
    together = sampling.draw(on_gpu, *args)
    for i in range(0, 256, 9):
        assert int(sampling.draw(on_gpu[i : i + 1], *(a[i : i + 1] for a in args))) == int(
            together[i]
        )


def test_the_starts_check() -> None:
    sampling_check.check("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [65, 151936])
def test_logprobs(dtype: torch.dtype, vocab: int) -> None:
    """A token's logprob and place: alone, in a batch and from the whole row, and near the truth."""
    from ops.kernels.triton import logprobs

    g = torch.Generator().manual_seed(1)
    x = (torch.randn(256, vocab, generator=g) * 3).to(dtype).cuda()
    token = torch.randint(vocab, (256,), generator=g).cuda()
    y = logprobs.log_softmax(x)
    assert (y.double() - torch.log_softmax(x.double(), -1)).abs().max() < 1e-5
    value, place = logprobs.of_tokens(x, token)
    mine = y.gather(1, token[:, None])
    assert torch.equal(value, mine[:, 0])
    at = torch.arange(vocab, device="cuda")
    assert torch.equal(place, ((y > mine) | ((y == mine) & (at <= token[:, None]))).sum(1))
    for n in (1, 2, 3, 17, 64):
        for start in (0, 100):
            some = slice(start, start + n)
            assert torch.equal(logprobs.of_tokens(x[some], token[some])[0], value[some])
            assert torch.equal(logprobs.log_softmax(x[some].clone()), y[some])


def test_penalties() -> None:
    """The arithmetic of ops/sampling_logits.py, one row at a time, from tables."""
    from ops import sampling_logits
    from ops.kernels.triton.edits import penalise

    g, vocab = torch.Generator().manual_seed(1), 1999
    x = torch.randn(3, vocab, generator=g) * 3
    counts, mask = torch.zeros(5, vocab, dtype=torch.int32), torch.zeros(5, 63, dtype=torch.int32)
    slots, options = [4, 0, 2], [(1.3, 0.9, -0.7), (1.0, 0.0, 0.3), (1.1, 0.0, 0.0)]
    tables = torch.zeros(3, 5)
    edits = []
    for slot, (r, f, p) in zip(slots, options, strict=True):
        prompt = torch.randint(vocab, (50,), generator=g).tolist()
        answer = torch.randint(90, (60,), generator=g).tolist()
        for token in prompt:
            mask[slot, token // 32] |= -(2**31) if token % 32 == 31 else 1 << token % 32
        for token in answer:
            counts[slot, token] += 1
        tables[:, slot] = torch.tensor([r, f, p])
        edits.append(sampling_logits.Edits(repetition=r, frequency=f, presence=p, prompt=prompt,
                                           answer=answer))  # fmt: skip
    want = sampling_logits.apply(x.clone(), edits)
    got = x.cuda()
    at = torch.tensor(slots, dtype=torch.int32).cuda()
    penalise(got, at, *tables.cuda(), mask.cuda(), counts.cuda())
    assert torch.equal(got.cpu(), want)
