"""Where the draw meets vLLM: seeds, choices, positions and temperatures, without an engine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops import sampling_hook
from ops.registry import OpsError

vllm = pytest.importorskip("vllm")
from vllm import SamplingParams  # noqa: E402


def _params(**fields: Any) -> Any:
    return SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, None),
        ({"seed": 5}, (5, 0, 0)),
        ({"seed": 0}, (0, 0, 0)),
        ({"seed": -7}, (-7, 0, 0)),
        ({"extra_args": {"samebits": {"seed": -1}}}, (-1, 0, 0)),
        ({"extra_args": {"samebits": {"seed": 3, "choice": 2, "offset": 40}}}, (3, 2, 40)),
        ({"seed": 9, "extra_args": {"samebits": {"seed": 3}}}, (3, 0, 0)),
        ({"seed": 9, "extra_args": {"other": 1}}, (9, 0, 0)),
    ],
)
def test_stream(fields: dict[str, Any], want: tuple[int, int, int] | None) -> None:
    assert sampling_hook.stream(_params(**fields)) == want


@pytest.mark.parametrize(
    "own",
    [
        {"seed": 2**63}, {"seed": -(2**63) - 1}, {"seed": True}, {"seed": "7"}, {"seed": 1.5}, {},
        {"seed": 1, "choice": -1}, {"seed": 1, "offset": 2**31}, {"seed": 1, "sed": 2}, 7,
    ],
)  # fmt: skip
def test_a_wrong_stream_is_refused(own: Any) -> None:
    with pytest.raises(ValueError, match="samebits|seed|choice|offset"):
        sampling_hook.stream(SimpleNamespace(extra_args={"samebits": own}, seed=None))


def test_complete_takes_the_seed_away_from_vllm() -> None:
    params = _params(seed=42, extra_args={"other": 1})
    sampling_hook.complete(params, "a")
    assert params.seed is None
    assert params.extra_args == {"other": 1, "samebits": {"seed": 42, "choice": 0, "offset": 0}}
    assert sampling_hook.assigned_seed("a") is None


def test_complete_draws_a_seed_and_tells() -> None:
    seen = set()
    for i in range(50):
        params = _params()
        sampling_hook.complete(params, f"r{i}")
        seed = params.extra_args["samebits"]["seed"]
        assert sampling_hook.assigned_seed(f"r{i}") == seed
        seen.add(seed)
    assert len(seen) == 50
    greedy = _params(temperature=0)
    sampling_hook.complete(greedy, "g")
    assert sampling_hook.assigned_seed("g") is None


def _request(**fields: Any) -> Any:
    params = _params(**fields)
    sampling_hook.complete(params, "x")
    return SimpleNamespace(
        req_id="x", sampling_params=params, prompt_token_ids=[1, 2, 3, 4], output_token_ids=[5, 6]
    )


def test_position_is_what_was_answered_plus_the_offset() -> None:
    plain = _request(seed=3)
    later = _request(extra_args={"samebits": {"seed": 3, "offset": 40}})
    found = sampling_hook.prepared(SimpleNamespace(), [plain, later])
    assert (found.seed == 3).all()
    assert (found.choice == 0).all()
    assert found.position.tolist() == [2, 42]
    plain.output_token_ids = [-1] * 7  # placeholders of asynchronous scheduling
    assert sampling_hook.prepared(SimpleNamespace(), [plain]).position.tolist() == [7]


def test_prepared_options_follow_the_batch() -> None:
    """Kept from step to step, with new positions; made anew when a row comes, goes or moves."""
    runner = SimpleNamespace()
    one, two = _request(seed=3, top_k=5), _request(seed=4, temperature=0.5)

    def same(requests: list[Any]) -> bool:
        got = sampling_hook.prepared(runner, requests)
        want = sampling_hook.prepared(SimpleNamespace(), requests)
        names = [field.name for field in dataclasses.fields(want) if field.compare]
        return all((getattr(got, n) == getattr(want, n)).all() for n in names)

    assert same([one, two])
    one.output_token_ids = [5, 6, 7]
    assert same([one, two])
    assert same([two, one])
    assert same([two])
    two.sampling_params = _request(seed=9).sampling_params
    assert same([two])


def test_a_request_without_a_seed_stops_the_draw() -> None:
    bare = SimpleNamespace(req_id="x", sampling_params=_params(), output_token_ids=[])
    with pytest.raises(OpsError, match="without a seed"):
        sampling_hook.edits(bare)
    with pytest.raises(OpsError, match="without a seed"):
        sampling_hook.prepared(SimpleNamespace(), [bare])


def test_edits_count_the_offset_as_answer() -> None:
    fields = {"presence_penalty": 1.0, "min_tokens": 3, "stop_token_ids": [77]}
    edit = sampling_hook.edits(_request(**fields))
    assert (edit.prompt, edit.answer, edit.banned) == ([1, 2, 3, 4], [5, 6], [77])
    edit = sampling_hook.edits(
        _request(**fields, extra_args={"samebits": {"seed": 1, "offset": 3}})
    )
    assert (edit.prompt, edit.answer) == ([1], [2, 3, 4, 5, 6])
    assert sampling_hook.edits(_request(min_tokens=2, stop_token_ids=[77])).empty
    assert sampling_hook.edits(_request(seed=1)).empty


def test_bound_to_vllm() -> None:
    """In its own process: what install() changes stays there."""
    import subprocess
    import sys

    script = """
import msgspec
from ops import sampling_hook
from vllm import SamplingParams
assert SamplingParams(temperature=0.001).temperature == 0.01  # stock lifts it
assert not sampling_hook.installed()
sampling_hook.install()
sampling_hook.install()
assert sampling_hook.installed()
p = SamplingParams(temperature=0.001, seed=7, n=3)
again = msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=SamplingParams)
assert again.temperature == 0.001, again
from vllm.v1.engine.parallel_sampling import ParentRequest
sampling_hook.complete(p, "p")
parent = ParentRequest.__new__(ParentRequest)
parent.sampling_params, parent.cached_child_sampling_params = p, None
children = [parent._get_child_sampling_params(i) for i in range(3)]
assert [sampling_hook.stream(c) for c in children] == [(7, 0, 0), (7, 1, 0), (7, 2, 0)]
assert all(c.n == 1 and c.seed is None for c in children)
from vllm.v1.worker import gpu_model_runner
import torch, types
batch = types.SimpleNamespace(max_num_logprobs=2, logprob_token_ids={}, req_ids=["a"])
logits = torch.zeros(1, 64)
out = types.SimpleNamespace(scheduled_spec_decode_tokens={})
import numpy as np
only = types.SimpleNamespace(
    grammar_bitmask=np.array([[8, 0]], np.int32), structured_output_request_ids=["a"])
gpu_model_runner.apply_grammar_bitmask(out, only, batch, logits)
assert torch.isfinite(logits).nonzero().tolist() == [[0, 3]]
assert torch.equal(batch._samebits_raw, torch.zeros(1, 64))  # raw logprobs stay raw
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_other_users_of_the_sampler_are_refused() -> None:
    with pytest.raises(OpsError, match="logprobs_mode"):
        sampling_hook.Sampler(SimpleNamespace(logprobs_mode="processed_logits"))
    ours = sampling_hook.Sampler(SimpleNamespace(logprobs_mode="raw_logprobs"))
    with pytest.raises(OpsError, match="speculative"):
        ours(logits=torch.zeros(1, 8), sampling_metadata=None)
    with pytest.raises(OpsError, match="speculative"):
        sampling_hook.sample(None, torch.zeros(1, 8), spec_decode_metadata=object())
