"""ops.scheduling on vLLM's real scheduler state: phases never mix, nothing is preempted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import json

import torch

BLOCK = 16
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN3))
    made = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        block_size=BLOCK,
        enforce_eager=True,
    ).create_engine_config()
    made.cache_config.num_gpu_blocks = 20
    return made


def scheduler(config: Any, blocks: int = 20, cls: Any = None) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from ops.scheduling import PhaseScheduler

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    config.cache_config.num_gpu_blocks = blocks
    grammar = SimpleNamespace(should_advance=lambda _: False)
    return (cls or PhaseScheduler)(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=grammar,
        block_size=BLOCK,
        log_stats=False,
    )


def request(name: str, prompt: int, answer: int) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(prompt)),
        sampling_params=params,
        pooling_params=None,
    )


def step(engine: Any) -> dict[str, int]:
    """One step; every row that got its last known token is given another."""
    from vllm.v1.outputs import ModelRunnerOutput

    out = engine.schedule()
    names = list(out.num_scheduled_tokens)
    if names:
        engine.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7] for _ in names],
            ),
        )
    return dict(out.num_scheduled_tokens)


def run(engine: Any, arrivals: dict[int, list[Any]]) -> list[dict[str, int]]:
    """All steps until nothing is left, with requests arriving at given steps."""
    steps: list[dict[str, int]] = []
    while len(steps) < 400:
        for arriving in arrivals.get(len(steps), []):
            engine.add_request(arriving)
        steps.append(step(engine))
        if not engine.has_unfinished_requests() and not any(i >= len(steps) for i in arrivals):
            return steps
    raise AssertionError("never done")


def mixed(steps: list[dict[str, int]], prompts: dict[str, int]) -> list[int]:
    """Steps in which some request had more than one token left to compute and another had one.

    A prompt's step is its first; a one-token prompt counts as prefill too.
    """
    seen: set[str] = set()
    found = []
    for i, scheduled in enumerate(steps):
        kinds = {name in seen for name in scheduled}
        if len(kinds) == 2:
            found.append(i)
        for name, tokens in scheduled.items():
            if name not in seen:
                assert tokens == prompts[name], "a prompt in more than one piece"
            else:
                assert tokens == 1
        seen |= set(scheduled)
    return found


PROMPTS = {"a": 40, "b": 7, "c": 1, "d": 64, "e": 33, "f": 12}


def arrivals() -> dict[int, list[Any]]:
    answers = {"a": 20, "b": 30, "c": 9, "d": 5, "e": 16, "f": 1}
    made = {name: request(name, n, answers[name]) for name, n in PROMPTS.items()}
    return {0: [made["a"], made["b"]], 2: [made["c"]], 3: [made["d"], made["e"]], 7: [made["f"]]}


def test_no_step_mixes_and_prompts_stay_whole(config: Any) -> None:
    steps = run(scheduler(config), arrivals())
    assert mixed(steps, PROMPTS) == []
    total = sum(sum(s.values()) for s in steps)
    assert total == sum(PROMPTS.values()) + (20 + 30 + 9 + 5 + 16 + 1) - len(PROMPTS)


def test_vllms_own_scheduler_is_caught(config: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert mixed(run(scheduler(config, cls=Scheduler), arrivals()), PROMPTS) != []


def many() -> dict[int, list[Any]]:
    return {0: [request(str(i), 16, 48) for i in range(4)]}


def test_memory_is_reserved_so_nothing_is_preempted(config: Any) -> None:
    """Four requests of up to four blocks each, with room for two at a time."""
    steps = run(scheduler(config, blocks=10), many())
    assert max(len(s) for s in steps) == 2


def test_without_reserving_vllm_preempts(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.scheduling import PhaseScheduler

    monkeypatch.setattr(PhaseScheduler, "_blocks_of", lambda self, request: 1)
    with pytest.raises(RuntimeError, match="about to be preempted"):
        run(scheduler(config, blocks=10), many())


def test_a_cache_too_small_for_one_request_stops_the_start(config: Any) -> None:
    with pytest.raises(ValueError, match="SAMEBITS_MAX_MODEL_LEN=128"):
        scheduler(config, blocks=8)


def test_order_of_arrival_is_kept(config: Any) -> None:
    """A small request does not overtake a large one that has to wait for room."""
    engine = scheduler(config, blocks=10)
    early = [request("first", 16, 100), request("large", 16, 100), request("small", 4, 4)]
    steps = run(engine, {0: early})
    starts = {}
    for i, scheduled in enumerate(steps):
        for name in scheduled:
            starts.setdefault(name, i)
    assert starts["first"] < starts["large"] <= starts["small"]
