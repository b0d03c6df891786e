"""The draw in a real engine: what seeds mean, whatever else runs; and that vLLM's own sampler,
put back in the same engine, breaks each of these."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]

# The tiny model's answers to two probes. They change only if the draw or the kernels change.
GOLDEN = {
    "plain": [
        279,
        422,
        163,
        58,
        125,
        56,
        492,
        56,
        276,
        312,
        233,
        67,
        326,
        326,
        70,
        326,
        421,
        70,
        41,
        70,
    ],
    "all three": [
        30,
        27,
        283,
        408,
        408,
        492,
        152,
        67,
        408,
        116,
        53,
        283,
        152,
        116,
        152,
        273,
        457,
        276,
        286,
        259,
    ],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """engine(mode): what that mode's engine answered; each is started once."""
    folder = tmp_path_factory.mktemp("draw")

    @functools.cache
    def run(mode: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine.draw_engine", mode, str(folder)],
            cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line[7:])
                return found
        raise AssertionError(done.stdout[-1000:] + done.stderr[-3000:])

    return run


@pytest.mark.parametrize("mode", ["ours", "sync"])
def test_neighbours_chunks_and_preemption(engine: Any, mode: str) -> None:
    """Alone, all together, and backwards in a crowd whose KV cache doesn't suffice."""
    found = engine(mode)
    assert found["together"] == found["alone"]
    assert found["crowded"] == found["alone"]
    assert found["preemptions"] > 0
    assert found["chunked_seed"] == "answered"
    assert len({tuple(t) for t in found["alone"]}) == len(found["alone"])


def test_neither_scheduling_nor_prefix_cache_matters(engine: Any) -> None:
    one, two = engine("ours"), engine("sync")
    for name in set(one) - {"unseeded", "preemptions"}:
        assert one[name] == two[name], name


def test_golden_tokens(engine: Any) -> None:
    from ops.kernels.cpu import load
    from tests.engine.draw_engine import PROBES

    if not load().name.startswith("native"):
        pytest.skip("the golden tokens are the compiled kernels'")
    alone = dict(zip(PROBES, engine("ours")["alone"], strict=True))
    for name, tokens in GOLDEN.items():
        assert alone[name] == tokens, name


def test_choices(engine: Any) -> None:
    """Choice i doesn't depend on n, choice 0 is the n = 1 answer, and none is another seed's."""
    found = engine("ours")["choices"]
    assert found["three"][0] == found["one"][0]
    assert found["five"][:3] == found["three"]
    assert len({tuple(t) for t in found["five"]}) == 5
    assert not [t for t in found["five"] if t in found["next seeds"]]


def test_continuation(engine: Any) -> None:
    found = engine("ours")["continued"]
    assert found["joined"] == found["whole"]
    assert all(len(t) == 40 for t in found["whole"])


def test_unseeded_requests_can_be_asked_for_again(engine: Any) -> None:
    found = engine("ours")["unseeded"]
    assert found["tokens"][0] != found["tokens"][1]
    assert found["again"] == found["tokens"]
    assert found["seeds"] != engine("sync")["unseeded"]["seeds"]


def test_greedy_knows_no_seed_and_others_do(engine: Any) -> None:
    found = engine("ours")
    assert len({tuple(t) for t in found["greedy_seeds"]}) == 1
    assert len({tuple(t) for t in found["different_seeds"]}) == 8


def test_small_temperatures_are_used_as_given(engine: Any) -> None:
    low, high = engine("ours")["small_temperatures"]
    assert low != high


def test_a_recycled_row_forgets_its_last_owner(engine: Any) -> None:
    found = engine("ours")["recycled"]
    assert found["after"] == found["alone"]


def test_logprobs_do_not_depend_on_k_or_neighbours(engine: Any) -> None:
    assert len({tuple(v) for v in engine("ours")["logprobs"]}) == 1


def test_logprobs_by_name_and_by_number_share_a_batch(engine: Any) -> None:
    by_name, beside, by_number, turned = engine("ours")["named_logprobs"]
    assert by_name == beside
    assert by_number == turned
    assert all({5, 6, 7} <= {t for t, _ in step} for step in by_name)
    assert all(len(step) in (3, 4) for step in by_number)


def test_a_seed_outside_int64_is_refused_at_the_door(engine: Any) -> None:
    assert "seed must be an integer" in engine("ours")["refused"]


def test_each_of_these_fails_with_vllms_own_sampler(engine: Any) -> None:
    """The planted fault: the same engine and ops, the stock sampler."""
    stock = engine("stock")
    assert stock["together"] != stock["alone"]
    assert stock["crowded"] != stock["alone"]
    choices = stock["choices"]
    assert choices["three"][1:] == choices["next seeds"][:2]  # choice i is seed + i
    low, high = stock["small_temperatures"]
    assert low == high  # both lifted to 0.01
    assert stock["recycled"]["after"] != stock["recycled"]["alone"]
    assert all(100 <= t < 120 for t in stock["recycled"]["after"])  # the last owner's tokens
    assert "offset" in engine("chunked")["chunked_seed"]  # the engine died
