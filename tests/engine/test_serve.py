"""From the command to a seeded completion, on the real engine and the real model."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from server import demo_model
from tests.engine.conftest import Running

pytestmark = pytest.mark.engine
MODEL = "smollm2-135m-instruct"


def ask(server: Running, **options: object) -> tuple[str, list[float]]:
    body = {"prompt": "The future of AI is", "max_tokens": 24, "temperature": 0.7, "logprobs": 1}
    answer = server.client().completions.create(model=MODEL, **{**body, **options})
    choice = answer.choices[0]
    return choice.text, choice.logprobs.token_logprobs


def test_seed_documents_example(server: Running) -> None:
    response = server.client().completions.create(
        model=MODEL, prompt="The future of AI is", max_tokens=100, temperature=0.7, seed=42
    )
    assert response.usage.completion_tokens == 100 or response.choices[0].finish_reason == "stop"
    assert response.choices[0].text.strip()
    assert response.system_fingerprint.startswith("sb1-")


def test_a_real_model_answers(server: Running) -> None:
    text, _ = ask(server, prompt="The capital of France is", temperature=0, max_tokens=3)
    assert "Paris" in text


@pytest.mark.parametrize("seed", [0, 42, -1, 2**63 - 1, -(2**63)])
def test_same_seed_twice_is_equal(server: Running, seed: int) -> None:
    assert ask(server, seed=seed) == ask(server, seed=seed)


def test_different_seeds_differ(server: Running) -> None:
    assert len({ask(server, seed=seed)[0] for seed in range(6)}) == 6


async def test_concurrent_equals_alone(server: Running) -> None:
    alone = [ask(server, seed=seed) for seed in range(8)]
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)

    async def one(seed: int) -> tuple[str, list[float]]:
        answer = await client.completions.create(
            model=MODEL,
            prompt="The future of AI is",
            max_tokens=24,
            temperature=0.7,
            logprobs=1,
            seed=seed,
        )
        return answer.choices[0].text, answer.choices[0].logprobs.token_logprobs

    assert await asyncio.gather(*(one(seed) for seed in range(8))) == alone


async def test_stream_equals_plain(server: Running) -> None:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)
    stream = await client.completions.create(
        model=MODEL,
        prompt="The future of AI is",
        max_tokens=24,
        temperature=0.7,
        logprobs=1,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert text == ask(server, seed=7)[0]
    assert chunks[-1].choices == [] and 0 < chunks[-1].usage.completion_tokens <= 24


def test_choice_0_of_many_is_the_single_one(server: Running) -> None:
    many = server.client().completions.create(
        model=MODEL, prompt="The future of AI is", max_tokens=24, temperature=0.7, seed=42, n=3
    )
    texts = [choice.text for choice in many.choices]
    assert texts[0] == ask(server, seed=42)[0] and len(set(texts)) == 3


def test_curl(server: Running) -> None:
    body = json.dumps(
        {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    )
    done = subprocess.run(
        [
            "curl",
            "-sS",
            f"{server.url}/v1/completions",
            "-H",
            "Content-Type: application/json",
            "-d",
            body,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(done.stdout)["choices"][0]["text"].startswith(" Paris")


def test_prompt_as_text_and_as_ids_agree(server: Running) -> None:
    with urllib.request.urlopen(
        urllib.request.Request(
            f"{server.url}/tokenize",
            json.dumps({"model": MODEL, "prompt": "The future of AI is"}).encode(),
            {"Content-Type": "application/json"},
        )
    ) as answer:
        ids = json.load(answer)["tokens"]
    assert ask(server, prompt=ids, seed=1) == ask(server, seed=1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": [[10**6]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x " * 9000}, "prompt"),
        ({"seed": 2**63}, "seed"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"sede": 1}}, "sede"),
        ({"extra_body": {"stop_token_ids": [10**9]}}, "stop_token_ids"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ],
)
def test_bad_fields_are_named(server: Running, options: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(server, **options)
    assert field in str(caught.value)
    assert "Paris" in ask(server, prompt="The capital of France is", temperature=0)[0]


def test_unknown_model(server: Running) -> None:
    with pytest.raises(NotFoundError):
        server.client().completions.create(model="nope", prompt="x")


def test_the_log_says_what_runs(server: Running) -> None:
    for word in ("device: cpu", "model: ", "ready: http", "try: curl"):
        assert word in server.log


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["--model", "/nowhere/at/all"], {}, "no such folder"),
        ([], {"SAMEBITS_MAX_NUM_SEQ": "3"}, "did you mean SAMEBITS_MAX_NUM_SEQS"),
        (["--port", "abc"], {}, "SAMEBITS_PORT=abc"),
        ([], {"VLLM_BATCH_INVARIANT": "0"}, "VLLM_BATCH_INVARIANT=0"),
        ([], {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS=other"),
        (["--quantization", "fp8"], {}, "SAMEBITS_QUANTIZATION=fp8"),
        (["--profile", "nope"], {}, "profile 'nope'"),
    ],
)
def test_a_bad_start_is_one_clear_line(start, args, env, words) -> None:
    code, log = start(*args, **env)
    assert code == 2 and words in log and "Traceback" not in log


def test_a_port_in_use_is_one_clear_line(start, server: Running) -> None:
    port = server.url.rsplit(":", 1)[1]
    code, log = start("--port", port)
    assert code == 2 and f"port {port}" in log and "Traceback" not in log


@pytest.mark.parametrize("fault", ["config", "weights", "cut", "architecture"])
def test_a_damaged_model_is_one_clear_line(start, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model.ensure(print), folder)
    if fault == "config":
        (folder / "config.json").unlink()
    elif fault == "weights":
        (folder / "model.safetensors").unlink()
    elif fault == "cut":
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(10**8)
    else:
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["NoSuchModel"], "model_type": "nosuch"}
        (folder / "config.json").write_text(json.dumps(config))
    code, log = start("--model", str(folder))
    assert code == 2 and str(folder) in log and "Traceback" not in log
