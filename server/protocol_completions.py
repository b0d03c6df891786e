"""The body of /v1/completions: what OpenAI documents and what vLLM adds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from server.errors import InvalidRequest
from server.protocol import SamplingFields

_PROMPT_SCHEMA = {
    "description": "one text, several texts, token ids, or several lists of token ids",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        },
    ],
}


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=0, le=128)] | None = None
    suffix: str = ""
    add_special_tokens: bool = True

    def check(self) -> None:
        """Rules between fields. Raises `InvalidRequest`."""
        if self.suffix:
            raise InvalidRequest(
                "suffix is not supported: the model does not fill in the middle", param="suffix"
            )
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest(
                f"best_of must equal n ({self.n}) or be absent: answers are not ranked here",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens: 0 only goes with echo: true", param="max_tokens")


def read_prompts(
    value: Any, *, max_prompts: int, max_model_len: int, vocab_size: int
) -> list[str | tuple[int, ...]]:
    """The prompts of a body, in order: texts, or token ids inside the vocabulary.

    Raises `InvalidRequest` naming the element: "prompt[3][0]". Lengths are checked before elements,
    so that a large bad body costs no more than a small one.
    """
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "prompt: should be a text, a list of texts, token ids, or a list of lists of token ids",
            param="prompt",
        )
    if type(value[0]) is int:
        return [_ids(value, "prompt", max_model_len, vocab_size)]
    if len(value) > max_prompts:
        raise InvalidRequest(
            f"prompt: {len(value)} prompts in one request; at most {max_prompts}", param="prompt"
        )
    if isinstance(value[0], str):
        return [_text(item, f"prompt[{i}]") for i, item in enumerate(value)]
    return [_ids(v, f"prompt[{i}]", max_model_len, vocab_size) for i, v in enumerate(value)]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}: should be a text, like the others", param=where)
    if not value:
        raise InvalidRequest(f"{where}: is empty", param=where)
    return value


def _ids(value: Any, where: str, max_model_len: int, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{where}: should be a list of token ids", param=where)
    if not value:
        raise InvalidRequest(f"{where}: is empty", param=where)
    if len(value) > max_model_len:
        raise InvalidRequest(
            f"{where}: {len(value)} tokens; the context is {max_model_len}",
            param=where,
            code="context_length_exceeded",
        )
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < vocab_size:
        return tuple(value)
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{where}[{index}]: should be a token id from 0 to {vocab_size - 1}",
                param=f"{where}[{index}]",
            )
    return tuple(value)
