"""What proves an answer: the canonical request, the digests, and the check of both. Pure;
docs/receipts.md is the spec.

A receipt binds three things: the numerics (fingerprint), the request (prompt token ids and
effective options, with the seed that was used), and the answer (token ids, their raw logprobs to
the last bit, text). It is one per choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from server.canonical import (
    sha256_of,
    sha256_of_floats,
    sha256_of_ids,
    sha256_of_text,
)
from server.engine import Sampling

SCHEMA = "samebits.receipt/1"
# Asking to see logprobs changes no token and no bit: the same request with and without them is one
# request.
OBSERVING = frozenset({"logprobs", "prompt_logprobs"})
# The options of schema 1, always written. An option that Sampling gains later is written only when
# it is set.
OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "choice",
    "position_offset",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "structured",
)
FLOATS = frozenset(
    "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty".split()
)
DIGESTS = ("request_sha256", "token_ids_sha256", "logprobs_sha256", "text_sha256")
REQUIRED = ("schema", "fingerprint", "model", "choice", *DIGESTS, "num_tokens", "finish_reason")


class BadReceipt(ValueError):
    """A receipt or log line that is no whole, unaltered receipt of this schema. The message says
    what is wrong.
    """


def options_of(sampling: Sampling) -> dict[str, Any]:
    """The effective options as JSON values: numbers as numbers, tuples as lists."""
    options: dict[str, Any] = {}
    for field in dataclasses.fields(sampling):
        value = getattr(sampling, field.name)
        if field.name in OBSERVING:
            continue
        if field.name in OPTIONS or value != field.default:
            options[field.name] = _listed(value)
    return options


def request_digest(token_ids: Sequence[int], options: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical request. Options that are floats by nature stay floats when written
    as 1 or 0.
    """
    exact: dict[str, Any] = {
        key: float(value) if key in FLOATS and type(value) is int else value
        for key, value in options.items()
    }
    if exact.get("logit_bias"):
        exact["logit_bias"] = [[int(i), float(b)] for i, b in exact["logit_bias"]]
    return sha256_of({"prompt_token_ids": list(token_ids), "options": exact})


def answer_digests(
    token_ids: Sequence[int], logprobs: Sequence[float] | None, text: str
) -> dict[str, Any]:
    """The digests of an answer. `logprobs` None: they were not recorded."""
    return {
        "token_ids_sha256": sha256_of_ids(token_ids),
        "logprobs_sha256": None if logprobs is None else sha256_of_floats(logprobs),
        "text_sha256": sha256_of_text(text),
        "num_tokens": len(token_ids),
    }


def check_shape(receipt: Any) -> dict[str, Any]:
    """The receipt, if it is a whole one of this schema. Raises `BadReceipt` naming the first thing
    that is wrong.
    """
    if not isinstance(receipt, dict):
        raise BadReceipt("no receipt: expected an object")
    schema = receipt.get("schema")
    if schema != SCHEMA:
        raise BadReceipt(f"schema {schema!r}: this version reads {SCHEMA} only")
    missing = [key for key in REQUIRED if key not in receipt]
    if missing:
        raise BadReceipt(f"{missing[0]} is missing: the receipt was cut or edited")
    for key in DIGESTS:
        value = receipt[key]
        if value is None and key == "logprobs_sha256":
            continue
        if not (isinstance(value, str) and len(value) == 64):
            raise BadReceipt(f"{key} is no SHA-256: the receipt was cut or edited")
    return receipt


def check_record(record: Mapping[str, Any]) -> None:
    """Whether a log line's request and answer are those of its receipt. Raises `BadReceipt` naming
    what was edited.
    """
    receipt = check_shape(record.get("receipt"))
    request, answer = record.get("request"), record.get("answer")
    try:
        if request is not None:
            found = request_digest(request["prompt_token_ids"], request["options"])
            _same("request_sha256", receipt, found)
        if answer is not None:
            digests = answer_digests(answer["token_ids"], answer["logprobs"], answer["text"])
            for key, value in digests.items():
                _same(key, receipt, value)
    except BadReceipt:
        raise
    except Exception as fault:
        kind = type(fault).__name__
        raise BadReceipt(f"request or answer is malformed ({kind}: {fault})") from None


def _same(key: str, receipt: Mapping[str, Any], found: Any) -> None:
    if receipt[key] != found:
        raise BadReceipt(f"{key} does not match the recorded content: the line was edited")


def _listed(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_listed(item) for item in value]
    return value
