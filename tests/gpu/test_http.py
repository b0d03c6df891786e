"""The server on CUDA, asked over HTTP: a model that takes vLLM's second model runner and one that
takes the first. What a seed means under load, and that every option reaches the draw there.

Random weights of realistic size; the tokenizer is the demo model's, from its folder in the cache or
from SAMEBITS_TEST_TOKENIZER.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("SAMEBITS_TEST_DEVICE") != "cpu",
        reason="no NVIDIA GPU (SAMEBITS_TEST_DEVICE=cpu rehearses these tests on the host)",
    ),
]
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "second": ("LlamaConfig", "LlamaForCausalLM", {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "num_hidden_layers": 4,
    }),
    "first": ("Qwen2Config", "Qwen2ForCausalLM", {
        "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 4,
    }),
}  # fmt: skip


def model(folder: Path, name: str) -> Path:
    """A checkpoint with random weights (deviation 0.04) and a real tokenizer."""
    import transformers

    from server.demo_model import ensure

    given = os.environ.get("SAMEBITS_TEST_TOKENIZER")
    source = Path(given) if given else ensure(print)
    config, kind, sizes = SHAPES[name]
    made = getattr(transformers, config)(
        vocab_size=49152, max_position_embeddings=2048, initializer_range=0.04, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=True, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, kind)(made).to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / file, folder)
    return folder


@pytest.fixture(scope="module", params=list(SHAPES))
def asked(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server and what test_draw_http asks of one."""
    from tests.engine.conftest import serving
    from tests.engine.test_draw_http import CHUNK, OPTIONS, Asked

    place = tmp_path_factory.mktemp(request.param)
    path = model(place / "model", request.param)
    options = (*OPTIONS, "--max-num-batched-tokens", str(CHUNK), "--model", str(path))
    options += ("--served-model-name", "random")
    if torch.cuda.is_available():
        # A fixed cache: servers beside each other on one card don't count each other's memory.
        options += ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2 << 30))
    command = (sys.executable, "-m", "server", "serve")
    with serving(place / "log", *options, command=command, SAMEBITS_NUM_THREADS="1") as running:
        print(running.log[-3000:])
        yield Asked(running.url, "random")


def test_what_a_seed_means_under_load(asked: Any) -> None:
    from tests.engine.test_draw_http import properties

    found = properties(asked)
    assert found == dict.fromkeys(found, True)
    assert len(found) == 9


EVERY: list[dict[str, Any]] = [
    {"logprobs": 5}, {"echo": True, "logprobs": 3}, {"prompt_logprobs": 2}, {"n": 2},
    {"bad_words": ["the", "a b"]}, {"min_tokens": 5, "stop_token_ids": [28, 30]},
    {"allowed_token_ids": list(range(400, 900, 3)), "top_p": 0.7}, {"top_k": 20000},
    {"top_k": 40, "top_p": 0.6, "min_p": 0.01}, {"repetition_penalty": 1.3}, {"temperature": 0},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}, "ignore_eos": False},
    {"logit_bias": {"300": 5.5, "301": -50}, "frequency_penalty": 1.1},
]  # fmt: skip


def test_every_option_alone_and_together(asked: Any) -> None:
    """Each by itself, then all at once among strangers, twice: the same tokens and logprobs."""
    bodies = [{"prompt": "Once upon a time, ", "seed": i, **o} for i, o in enumerate(EVERY)]
    alone = [asked.bits(**b) for b in bodies]
    with asked.load(), ThreadPoolExecutor(len(bodies)) as pool:
        for _ in range(2):
            assert list(pool.map(lambda b: asked.bits(**b), bodies)) == alone
    assert [asked.bits(**b) for b in bodies] == alone
    plain = asked.bits(prompt="Once upon a time, ", seed=8, temperature=1)
    assert plain != alone[8]  # its filters did something


def test_min_tokens_is_exact(asked: Any) -> None:
    """A stop token that would come at once comes right after min_tokens, not one later."""
    for least in (1, 3):
        answer = asked.ask(prompt="So", min_tokens=least, stop_token_ids=[500],
                           logit_bias={"500": 100}, max_tokens=9)  # fmt: skip
        ids = answer["choices"][0]["token_ids"]
        assert 500 not in ids[:least]
        assert ids[least:] == [500], ids


def test_penalties_count_the_answer_of_an_offset(asked: Any) -> None:
    """A continued answer is the whole one's rest, with penalties that look at all of it."""
    ids = asked.ids("Numbers: one two")
    for options in (
        {"presence_penalty": 1.7}, {"frequency_penalty": 0.9, "seed": 5},
        {"repetition_penalty": 1.4, "temperature": 0.4},
    ):  # fmt: skip
        body = {"seed": 3, **options}
        whole = asked.tokens(prompt=ids, max_tokens=16, **body)
        rest = asked.tokens(
            prompt=ids + whole[:6], max_tokens=10, samebits_position_offset=6, **body
        )
        assert whole[6:] == rest


def test_lists_that_are_too_long_are_refused_by_name(asked: Any) -> None:
    body = {"model": "random", "prompt": "x", "max_tokens": 1,
            "allowed_token_ids": list(range(1500))}  # fmt: skip
    answer = asked.http.post("/v1/completions", json=body)
    assert answer.status_code in (200, 400)  # only the second runner has a limit
    if answer.status_code == 400:
        assert "allowed_token_ids" in answer.text
    assert asked.http.get("/ready").status_code == 200
