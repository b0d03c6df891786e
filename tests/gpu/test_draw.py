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
