"""The one order of `ops.collectives`, on 2, 3 and 4 gloo processes, against a sum made in this
process from every rank's part.

Each process reports the names of the cases that failed; the tests below name them. Stock gloo goes
through the same cases and is caught: that is what says that the cases can fail.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ops import collectives

SHAPES = [(1, 64), (7, 512), (184, 512), (736, 512), (3, 5), (1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parts(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What each rank holds; a different magnitude in every column, so that another order of adding
    shows."""
    draw = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 2, shape[-1])[torch.randperm(shape[-1], generator=draw)]
    return (torch.randn(size, *shape, generator=draw) * scale).to(dtype)


def expected(held: torch.Tensor) -> torch.Tensor:
    total = held[0].float()
    for part in held[1:]:
        total = total + part.float()
    return total.to(held.dtype)


def stock_all_reduce(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    torch.distributed.all_reduce(y)
    return y


def cases(rank: int, size: int, ours: bool) -> list[str]:
    """The names of the cases that this rank saw fail."""
    via = collectives.link()
    reduce = (lambda x: collectives.all_reduce(x, via)) if ours else stock_all_reduce
    failed = []
    for dtype in DTYPES:
        for shape in SHAPES:
            held = parts(size, shape, dtype, 1)
            if not torch.equal(reduce(held[rank].clone()), expected(held)):
                failed.append(f"sum {dtype} {shape}")
        held = parts(size, (736, 512), dtype, 2)
        whole = reduce(held[rank].clone())
        for m in (1, 7, 184):
            if not torch.equal(reduce(held[rank, :m].clone()), whole[:m]):
                failed.append(f"rows {dtype} {m}")
    return failed


def late_cases(rank: int, size: int) -> list[str]:
    """Every rank in turn arrives last; the bits stay."""
    via = collectives.link()
    held = parts(size, (184, 512), torch.bfloat16, 3)
    failed = []
    for late in range(size):
        if rank == late:
            time.sleep(0.05)
        if not torch.equal(collectives.all_reduce(held[rank], via), expected(held)):
            failed.append(f"late rank {late}")
    return failed


def scheme_cases(rank: int, size: int) -> list[str]:
    """Gather and slices, forced by the limit, and a link without all-to-all: one result."""
    via = collectives.link()
    bare = collectives.Link(via.rank, via.size, via.all_gather, None)
    failed = []
    kept = collectives.GATHER_LIMIT_BYTES
    for shape in SHAPES:
        held = parts(size, shape, torch.bfloat16, 4)
        results = [collectives.all_reduce(held[rank], bare)]
        for limit in (0, 1 << 40):
            collectives.GATHER_LIMIT_BYTES = limit
            results.append(collectives.all_reduce(held[rank], via))
        if not all(torch.equal(result, expected(held)) for result in results):
            failed.append(f"scheme {shape}")
    collectives.GATHER_LIMIT_BYTES = kept
    return failed


def scatter_cases(rank: int, size: int) -> list[str]:
    """Each rank's part of the sum, along the first, the middle and the last dimension."""
    via = collectives.link()
    bare = collectives.Link(via.rank, via.size, via.all_gather, None)
    failed = []
    for dim in (0, 1, -1):
        held = parts(size, (12, 24, 36), torch.bfloat16, 5)
        want = expected(held).chunk(size, dim)[rank]
        for name, way in (("slices", via), ("gather", bare)):
            if not torch.equal(collectives.reduce_scatter(held[rank], way, dim), want):
                failed.append(f"scatter {dim} {name}")
    return failed


def equal_on_all(rank: int, size: int) -> list[str]:
    via = collectives.link()
    held = parts(size, (300, 512), torch.bfloat16, 6)
    mine = collectives.all_reduce(held[rank], via).view(torch.int16)
    digests: list[Any] = [None] * size
    torch.distributed.all_gather_object(digests, mine.numpy().tobytes())
    return [] if len(set(digests)) == 1 else ["ranks differ"]


def process(rank: int, size: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    found = {
        "ours": cases(rank, size, True),
        "stock": cases(rank, size, False),
        "late": late_cases(rank, size),
        "schemes": scheme_cases(rank, size),
        "scatter": scatter_cases(rank, size),
        "everywhere": equal_on_all(rank, size),
    }
    torch.save(found, Path(out) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3, 4])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    size = request.param
    out = tmp_path_factory.mktemp(f"world{size}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=process, args=(r, size, port, str(out))) for r in range(size)]
    for one in running:
        one.start()
    for one in running:
        one.join(120)
    assert [one.exitcode for one in running] == [0] * size
    ranks = [torch.load(out / f"{r}.pt") for r in range(size)]
    together: dict[str, list[str]] = {"size": [str(size)]}
    for name in ranks[0]:
        together[name] = sorted({case for rank in ranks for case in rank[name]})
    return together


@pytest.mark.parametrize("what", ["ours", "late", "schemes", "scatter", "everywhere"])
def test_one_order(found: dict[str, list[str]], what: str) -> None:
    assert found[what] == []


def test_stock_gloo_is_caught(found: dict[str, list[str]]) -> None:
    """Two ranks have one order; with more, gloo's own depends on where in the message an element
    stands."""
    if found["size"] != ["2"]:
        assert any(case.startswith("rows") for case in found["stock"])
    assert any(case.startswith("sum") for case in found["stock"]) or found["size"] == ["2"]


def test_ordered_sum_rounds_once_at_the_end() -> None:
    held = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert collectives.ordered_sum(held).item() == 258.0
    in_bf16 = (held[0] + held[1]) + held[2]
    assert in_bf16.item() == 256.0  # what rounding at every step would have lost


def test_ordered_sum_leaves_its_parts_alone() -> None:
    held = parts(3, (4, 8), torch.float32, 7)
    before = held.clone()
    collectives.ordered_sum(held)
    assert torch.equal(held, before)


def test_integers_are_exact_and_bools_refused() -> None:
    held = torch.tensor([[2**40], [1], [-3]])
    assert collectives.ordered_sum(held).item() == 2**40 - 2
    with pytest.raises(TypeError, match=r"torch\.bool"):
        collectives.ordered_sum(torch.ones(2, 3, dtype=torch.bool))


def test_scatter_names_what_does_not_divide() -> None:
    via = collectives.Link(0, 3, lambda _o, _x: None, None)
    with pytest.raises(ValueError, match="3 ranks do not divide"):
        collectives.reduce_scatter(torch.zeros(4, 6), via, 0)
