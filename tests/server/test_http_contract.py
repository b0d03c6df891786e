"""The clients people use: openai-python, curl, LiteLLM, LangChain; and no torch on this side."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import openai
import pytest

from tests.server.live import Live, strict

SAY = [{"role": "user", "content": "say:one \U0001f642 two"}]


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="The future of AI is", max_tokens=10, temperature=0.7, seed=42
    )
    again = client.completions.create(
        model="fake", prompt="The future of AI is", max_tokens=10, temperature=0.7, seed=42
    )
    assert answer.choices[0].text == again.choices[0].text != ""
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.system_fingerprint == "sb_fake"
    assert answer.id.startswith("cmpl-")
    assert abs(answer.created - __import__("time").time()) < 60


def test_completions_with_everything(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt=["Hello", " the"], best_of=2, echo=True, frequency_penalty=0.1,
        logit_bias={"5": 1}, logprobs=2, max_tokens=4, n=2, presence_penalty=0.1, seed=1,
        stop=["zzz"], stream=False, suffix=None, temperature=1, top_p=0.9, user="me",
        extra_body={"top_k": 5, "min_p": 0.0, "return_token_ids": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert answer.choices[0].model_extra["token_ids"]


def test_completion_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake", prompt="Hello", n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert [len(chunk.choices) for chunk in chunks].count(0) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 32
    assert {c.choices[0].index for c in chunks[:-1]} == {0, 1}


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=SAY, logprobs=True, top_logprobs=2, max_completion_tokens=50, seed=1
    )
    assert answer.choices[0].message.content == "one \U0001f642 two"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2
    history = [*SAY, answer.choices[0].message, {"role": "user", "content": "say:more"}]
    dumped = [m if isinstance(m, dict) else m.model_dump() for m in history]
    assert client.chat.completions.create(model="fake", messages=dumped, seed=1).choices


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=SAY, seed=1) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "one \U0001f642 two"
    assert final.choices[0].finish_reason == "stop"


def test_chat_tools(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    choice: Any = {"type": "function", "function": {"name": "f"}}
    said = [{"role": "user", "content": 'say:{"a": 1}'}]
    with client.chat.completions.stream(
        model="fake", messages=said, tools=tools, tool_choice=choice, seed=1
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert (calls[0].function.name, calls[0].function.arguments) == ("f", '{"a": 1}')


async def test_async(live: Live) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x") as client:
        plain = await client.completions.create(model="fake", prompt="Hello", seed=5)
        stream = await client.completions.create(model="fake", prompt="Hello", seed=5, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == plain.choices[0].text
        assert [model.id async for model in client.models.list()] == ["fake", "org/fake-7b"]
        assert (await client.models.retrieve("org/fake-7b")).id == "org/fake-7b"


def test_errors_become_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="a", temperature=5)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.InternalServerError) as missing:
        client.responses.create(model="fake", input="a")
    assert missing.value.status_code == 501


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(live: Live, client: openai.OpenAI) -> None:
    body = {"model": "fake", "prompt": "The future of AI is", "seed": 42, "max_tokens": 12}
    command = ["curl", "-sS", "-N", f"{live.url}/v1/completions"]
    command += ["-H", "Content-Type: application/json", "-d"]
    plain = subprocess.run([*command, json.dumps(body)], capture_output=True, check=True)
    stream = subprocess.run(
        [*command, json.dumps({**body, "stream": True})], capture_output=True, check=True
    )
    text = strict(plain.stdout.decode())["choices"][0]["text"]
    lines = stream.stdout.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [strict(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(c["choices"][0]["text"] for c in chunks) == text
    assert client.completions.create(**body).choices[0].text == text


@pytest.mark.slow  # its import alone takes 15 s
def test_litellm(live: Live) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed (optional)")
    where: dict[str, Any] = {"api_base": f"{live.url}/v1", "api_key": "x", "seed": 1}
    answer = litellm.text_completion(
        model="text-completion-openai/fake", prompt="say:one two", **where
    )
    assert answer.choices[0].text == "one two"
    chat = litellm.completion("openai/fake", SAY, **where)
    assert chat.choices[0].message.content == "one \U0001f642 two"
    stream = litellm.completion("openai/fake", SAY, stream=True, **where)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "one \U0001f642 two"


def test_langchain(live: Live) -> None:
    langchain = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed (optional)"
    )
    where: dict[str, Any] = {"base_url": f"{live.url}/v1", "api_key": "x", "model": "fake"}
    chat = langchain.ChatOpenAI(**where, seed=1, temperature=0.5)
    assert chat.invoke("say:one two").content == "one two"
    assert "".join(chunk.content for chunk in chat.stream("say:one two")) == "one two"
    llm = langchain.OpenAI(**where, seed=1)
    assert llm.invoke("say:one two") == "one two"


def test_this_side_needs_no_torch_and_no_vllm() -> None:
    code = (
        "import sys, server.app, server.serve, tests.server.fake\n"
        "found = {'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
