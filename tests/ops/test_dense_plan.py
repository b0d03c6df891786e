"""Which library algorithms enter a plan for products on CUDA: on the host, with a library of our
own in the place of cuBLASLt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from ops.kernels import dense


class Library:
    """Algorithms by name: each is the true product, but for the numbers of rows where it lies."""

    CublasLtError = RuntimeError

    def __init__(self, **wrong: Callable[[int], bool]) -> None:
        self.wrong = wrong

    def algorithms(self, *_: object) -> list[str]:
        return list(self.wrong)

    def product(self, name: str, *_: object) -> dense.Way:
        def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            y = dense.by_triton(x, weight, bias)
            if self.wrong[name](x.shape[0]):
                y[-1, -1] += 1
            return y

        return run


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dense.Band, ...]]:
    """Algorithms -> the plan of a small weight; the first proven algorithm is the fastest."""

    def made(**wrong: Callable[[int], bool]) -> tuple[dense.Band, ...]:
        monkeypatch.setattr(dense, "cublaslt", Library(**wrong))
        monkeypatch.setattr(
            dense, "by_triton", lambda x, w, b: (x.float() @ w.float().T).bfloat16()
        )
        monkeypatch.setattr(dense.Planner, "_time_us", lambda *_: 1.0)
        weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        return dense.Planner().plan(weight)

    return made


@pytest.mark.parametrize("rows", [1, 3, 8, 24, 31, 33, 63, 65, 96, 129, 512])
def test_an_algorithm_that_differs_at_some_number_of_rows_is_left_out(plan, rows) -> None:
    found = plan(bad=lambda m: m == rows, good=lambda m: False)
    for low, band in zip((0, *dense.BANDS), found, strict=False):
        assert band.name == ("good" if low < rows <= band.rows else "bad"), band


def test_where_none_is_right_the_definition_runs(plan) -> None:
    assert {band.name for band in plan(bad=lambda m: True)} == {"triton"}
    assert {band.name for band in plan()} == {"triton"}


def test_every_number_of_rows_up_to_64_is_proven_and_the_ends_of_every_band() -> None:
    found = [m for low, high in pairwise((0, *dense.BANDS)) for m in dense.proof_counts(low, high)]
    assert set(range(1, 65)) <= set(found)
    assert {low + 1 for low in (0, *dense.BANDS[:-1])} | set(dense.BANDS) <= set(found)
