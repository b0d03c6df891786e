"""The whole server on the stand-in NPU: vLLM's engine, the real NPUWorker and NPUModelRunner of
vllm-ascend, real torch_npu, our overrides and our Triton kernels in the interpreter.

What holds here is plumbing: that the right kernels are bound, reached, checked and refused. The
bits are a CPU's.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.ascend.conftest import HERE, ROOT, Server, serving, variables
from tests.ascend.taken_out import TAKE

PROMPTS = [
    "Hello world",
    "a",
    "The quick brown fox jumps over the lazy dog",
    "bits " * 17,
    "0123456789" * 4,
]


@pytest.fixture(scope="module", params=["dense", "moe", "dense on 2"])
def server(
    request: pytest.FixtureRequest,
    npu: Path,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    kind, _, size = request.param.partition(" on ")
    env = variables(STANDIN_NPUS=size, OMP_NUM_THREADS="1") if size else variables()
    more = {"tensor-parallel-size": size} if size else {}
    with serving(npu, models[kind], log, env, **more) as running:
        assert running.wait(), running.text()[-3000:]
        yield running


async def ask(client: openai.AsyncOpenAI, prompt: str, **more: Any) -> dict[str, Any]:
    answer = await client.completions.create(
        model="tiny", prompt=prompt, logprobs=3, **{"seed": 42, "max_tokens": 5, **more}
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    return {
        "text": choice.text,
        "tokens": choice.logprobs.tokens,
        "logprobs": choice.logprobs.token_logprobs,
        "top": choice.logprobs.top_logprobs,
        "fingerprint": answer.system_fingerprint,
    }


def test_the_openai_client_is_answered_alike_alone_and_together(server: Server) -> None:
    async def talk() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            alone = [await ask(client, prompt) for prompt in PROMPTS]
            backwards = PROMPTS[::-1] * 2
            together = await asyncio.gather(*(ask(client, prompt) for prompt in backwards))
            other = await ask(client, PROMPTS[0], seed=43)
            assert other["tokens"] != alone[0]["tokens"]
            return alone, together

    alone, together = asyncio.run(talk())
    assert together == alone[::-1] * 2
    assert alone[0]["fingerprint"].startswith("sb1-")


def test_one_request_again_and_again(server: Server, request: pytest.FixtureRequest) -> None:
    """vllm-ascend issues 14884, 11317 and 6089: twenty times alone, then twenty among others."""
    if request.node.callspec.params["server"] != "dense":
        pytest.skip("one model is enough: the others are slow here")

    async def talk() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            alone = [await ask(client, "again", max_tokens=3) for _ in range(20)]
            copies = [ask(client, "again", max_tokens=3) for _ in range(20)]
            others = [ask(client, "x" * i, seed=i, max_tokens=1 + i % 3) for i in range(1, 13)]
            mixed = [ask for pair in zip(copies, others, strict=False) for ask in pair]
            answers = await asyncio.gather(*mixed, *copies[len(others) :])
            return alone, [*answers[: len(mixed) : 2], *answers[len(mixed) :]]

    alone, among = asyncio.run(talk())
    assert len(alone) == len(among) == 20
    assert all(answer == alone[0] for answer in (*alone, *among))


def test_chat(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    said = [{"role": "user", "content": "Hi"}]
    answers = {
        client.chat.completions.create(model="tiny", messages=said, max_tokens=4, seed=7)  # type: ignore[arg-type]
        .choices[0]
        .message.content
        for _ in range(2)
    }
    assert len(answers) == 1


REFUSED = {
    "library": ({"library": False}, "HAS_ASCENDC_BATCH_INVARIANT is False"),
    "library on one rank of two": (
        {"STANDIN_FAULT": "rank", "STANDIN_NPUS": "2", "OMP_NUM_THREADS": "1"},
        "HAS_ASCENDC_BATCH_INVARIANT is False",
    ),
    "triton": ({"triton": False}, "triton-ascend"),
    "AIV": ({"HCCL_OP_EXPANSION_MODE": "AIV"}, "HCCL_OP_EXPANSION_MODE=AIV"),
    "planted fault": ({"STANDIN_FAULT": "split"}, "rows: "),
    "second owner": ({"STANDIN_FAULT": "owner"}, "already has an owner"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_start_is_refused(
    what: str, npu: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    refused(what, npu, models["dense"], tmp_path / "log")


@pytest.mark.slow
@pytest.mark.parametrize("what", TAKE)
def test_with_the_refusal_taken_out_it_is_not(
    what: str, npu: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    more = {"STANDIN_TAKE_OUT": what, "PYTHONDONTWRITEBYTECODE": "1"}
    with pytest.raises(AssertionError) as failed:
        refused(what, npu, models["dense"], tmp_path / "log", **more)
    assert "neither ready nor ended" not in str(failed.value)


def refused(what: str, npu: Path, model: Path, log: Path, **more: str) -> None:
    """The start ends with the right code, and says why."""
    changed, message = REFUSED[what]
    env = variables(**changed, **more)  # type: ignore[arg-type]
    size = {"tensor-parallel-size": changed["STANDIN_NPUS"]} if "STANDIN_NPUS" in changed else {}
    with serving(npu, model, log, env, **size) as running:
        assert not running.wait()
        said = ("samebits:", "error", "NotInstalled")  # the last: in a worker's own words
        last = [line for line in running.text().splitlines() if any(w in line for w in said)]
        assert running.process.returncode in (2, 3), running.text()[-2000:]
        assert any(message in line for line in last), running.text()[-2000:]


def test_a_row_that_is_not_bound_is_refused(npu: Path) -> None:
    """Each op of the table, on torch_npu's real dispatcher and vllm-ascend's real classes."""
    env = variables(PYTHONDONTWRITEBYTECODE="1")
    env["PYTHONPATH"] += f":{ROOT}"
    done = subprocess.run(
        [npu, HERE / "unbound_probe.py"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["bound"]) >= 24 and all(found["bound"].values())
    for said in found["refused"].values():
        assert said.endswith("was installed but is not what runs")
    assert set(found["looked away"].values()) == {"taken"}


def test_every_override_is_reached_by_a_served_model(npu: Path, models: dict[str, Path]) -> None:
    """In one process: the counts of each bound op before and after a few answers."""
    for kind, wanted in (
        ("dense", {"npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "linear", "rotary"}),
        ("moe", {"experts", "npu_rms_norm", "npu_fused_infer_attention_score"}),
    ):
        env = variables(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
        env["PYTHONPATH"] += f":{ROOT}"
        done = subprocess.run(
            [npu, HERE / "engine_probe.py", models[kind]],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["faults"] == {}
        assert wanted <= {name for name, count in found["hits"].items() if count > 0}
        assert found["stock"] == {}, "torch_npu's own kernels ran"
        assert found["alone"] == found["together"]
        assert found["scheduler"] == "PhaseScheduler"
