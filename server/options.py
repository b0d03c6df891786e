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
from server.wire import loads

if TYPE_CHECKING:
    from config.settings import Settings
    from server.engine import Engine, ModelInfo

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


def read_structured(body: SamplingFields, settings: Settings) -> tuple[str, str] | None:
    """(kind, text) from `response_format` or `structured_outputs`; at most one of the two."""
    form = _response_format(body.response_format)
    direct = _structured_outputs(body.structured_outputs, settings)
    if form and direct:
        raise InvalidRequest(
            "structured_outputs: response_format is set as well; send one of them",
            param="structured_outputs",
        )
    return form or direct


async def check_grammar(
    wanted: tuple[str, str] | None, body: SamplingFields, settings: Settings, engine: Engine
) -> None:
    """Raises `InvalidRequest` on a grammar that is too long, or that no answer can follow."""
    if wanted is None:
        return
    if body.ignore_eos:
        raise InvalidRequest(
            "ignore_eos: not with a grammar; where that ends, the answer would go on without it",
            param="ignore_eos",
        )
    kind, text = wanted
    where = "tools" if kind not in (body.structured_outputs or {}) else "structured_outputs"
    if body.response_format is not None and where == "tools":
        where = "response_format"
    _check_length(text, where, settings)
    if fault := await engine.grammar_fault(kind, text):
        raise InvalidRequest(f"{where}: {fault}", param=where)


def _check_length(text: str, where: str, settings: Settings) -> None:
    if len(text) > settings.max_grammar_chars:
        raise InvalidRequest(
            f"{where}: {len(text)} characters; at most {settings.max_grammar_chars}", param=where
        )


def _only(given: dict[str, Any], known: frozenset[str], where: str) -> None:
    """Raises `InvalidRequest` on a key that would be dropped."""
    for key in given.keys() - known:
        if given[key] is not None:
            at = f"{where}.{key[:100]}"
            raise InvalidRequest(
                f"{at}: unknown; known are {', '.join(sorted(known))}",
                param=at,
                code="unknown_parameter",
            )


def _response_format(form: dict[str, Any] | None) -> tuple[str, str] | None:
    if form is None:
        return None
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(
            "response_format.type: should be text, json_object or json_schema",
            param="response_format.type",
        )
    if kind != "json_schema":
        _only(form, frozenset({"type"}), "response_format")
        return None if kind == "text" else ("json_object", "{}")
    _only(form, frozenset({"type", "json_schema"}), "response_format")
    where = "response_format.json_schema"
    wrapped = form.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(wrapped, dict) or not isinstance(schema, dict):
        raise InvalidRequest(f"{where}.schema: should be an object", param=f"{where}.schema")
    _only(wrapped, frozenset({"name", "description", "schema", "strict"}), where)
    return ("json", json.dumps(schema))


def _structured_outputs(given: dict[str, Any] | None, settings: Settings) -> tuple[str, str] | None:
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
        if value is not True:
            raise InvalidRequest(f"{where}: should be true", param=where)
        return ("json_object", "{}")
    if kind == "json":
        return ("json", _schema_text(value, where, settings))
    if kind == "choice":
        texts = isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
        if not texts:
            raise InvalidRequest(f"{where}: should be a list of texts", param=where)
        return ("choice", json.dumps(value))
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{where}: should be a text", param=where)
    return (kind, value)


def _schema_text(value: Any, where: str, settings: Settings) -> str:
    if isinstance(value, str):
        _check_length(value, where, settings)
        try:
            value = loads(value.encode(), max_depth=settings.max_json_depth)
        except InvalidRequest as fault:
            said = fault.message.replace("the body", "the schema")
            raise InvalidRequest(f"{where}: {said}", param=where) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: should be a JSON schema", param=where)
    return json.dumps(value)
