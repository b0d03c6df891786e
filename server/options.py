"""From a checked body to the effective options of a run: every default filled in, nothing
dropped.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from server.engine import Sampling
from server.errors import InvalidRequest
from server.limits import read_logit_bias, read_stop
from server.protocol import SamplingFields

if TYPE_CHECKING:
    from config.settings import Settings
    from server.engine import ModelInfo

STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object")

# Options that run as they were sent.
AS_SENT = (
    "temperature", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip


def sampling_of(
    body: SamplingFields,
    settings: Settings,
    info: ModelInfo,
    *,
    seed: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: tuple[str, str] | None,
) -> Sampling:
    """The options of choice 0. `top_p: 0` means the most likely token alone, which is
    `top_k: 1`.
    """
    if body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {body.min_tokens}; at most max_tokens, {max_tokens}", param="min_tokens"
        )
    only_best = body.top_p == 0
    allowed = body.allowed_token_ids
    return Sampling(
        **{name: getattr(body, name) for name in AS_SENT},
        max_tokens=max_tokens,
        top_p=1.0 if only_best else body.top_p,
        top_k=1 if only_best else max(0, body.top_k),
        seed=seed,
        position_offset=body.samebits_position_offset,
        logit_bias=read_logit_bias(body, info),
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        bad_words=tuple(body.bad_words),
        stop=read_stop(body.stop, settings),
        stop_token_ids=tuple(sorted(set(body.stop_token_ids))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured=structured,
    )


def read_structured(body: SamplingFields) -> tuple[str, str] | None:
    """(kind, text) from `response_format` or `structured_outputs`; at most one of the two."""
    form = _response_format(body.response_format)
    direct = _structured_outputs(body.structured_outputs)
    if form and direct:
        raise InvalidRequest(
            "structured_outputs: response_format is set as well; send one of them",
            param="structured_outputs",
        )
    return form or direct


def _response_format(form: dict[str, Any] | None) -> tuple[str, str] | None:
    if form is None:
        return None
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ("json_object", "{}")
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format.type: should be text, json_object or json_schema",
            param="response_format.type",
        )
    wrapped = form.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest(
            "response_format.json_schema.schema: should be an object",
            param="response_format.json_schema.schema",
        )
    return ("json", json.dumps(schema))


def _structured_outputs(given: dict[str, Any] | None) -> tuple[str, str] | None:
    if given is None:
        return None
    asked = {key: value for key, value in given.items() if value is not None and value is not False}
    unknown = sorted(asked.keys() - set(STRUCTURED_KINDS))
    if unknown or len(asked) != 1:
        raise InvalidRequest(
            "structured_outputs: should have exactly one of " + ", ".join(STRUCTURED_KINDS),
            param=f"structured_outputs.{unknown[0][:100]}" if unknown else "structured_outputs",
        )
    kind, value = next(iter(asked.items()))
    where = f"structured_outputs.{kind}"
    if kind == "json_object":
        return ("json_object", "{}")
    if kind == "json":
        return ("json", _schema_text(value, where))
    if kind == "choice":
        texts = isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
        if not texts:
            raise InvalidRequest(f"{where}: should be a list of texts", param=where)
        return ("choice", json.dumps(value))
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{where}: should be a text", param=where)
    return (kind, value)


def _schema_text(value: Any, where: str) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: should be a JSON schema", param=where)
    return json.dumps(value)
