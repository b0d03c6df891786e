"""What proves an answer: the canonical request, the digests, and the check of both. Pure;
docs/receipts.md is the spec.

A receipt binds three things: the numerics (fingerprint), the request (prompt token ids and
effective options, with the seed that was used), and the answer (token ids, their raw logprobs to
the last bit, text). It is one per choice.
"""

from __future__ import annotations

import dataclasses
import re
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
TYPES: Mapping[str, type] = {
    "fingerprint": str,
    "model": str,
    "choice": int,
    "num_tokens": int,
    "seed": int,
}
# Members of a log line and of its parts. Another one would be content that nothing vouches for.
MEMBERS = frozenset({"receipt", "request", "answer", "line_sha256"})
REQUEST = frozenset({"prompt_token_ids", "options", "prompt"})
ANSWER = frozenset({"token_ids", "logprobs", "text", "finish_reason", "stop_reason"})
DIGESTS = ("request_sha256", "token_ids_sha256", "logprobs_sha256", "text_sha256")
REQUIRED = ("schema", "fingerprint", "model", "choice", *DIGESTS, "num_tokens", "finish_reason")

_HEX = re.compile("[0-9a-f]{64}")


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
        if not (isinstance(value, str) and _HEX.fullmatch(value)):
            raise BadReceipt(f"{key} is no SHA-256: the receipt was cut or edited")
    for key, kind in TYPES.items():
        if key in receipt and type(receipt[key]) is not kind:
            raise BadReceipt(f"{key} should be {kind.__name__}: the receipt was edited")
    whole = receipt.get("fingerprint_sha256")
    if whole is not None and receipt["fingerprint"] != f"sb1-{whole}"[:20]:
        raise BadReceipt("fingerprint is not the head of fingerprint_sha256: one was edited")
    return receipt


def line_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 over what a log line holds beside the digested content: the receipt itself, and the
    prompt's text, finish_reason and stop_reason.
    """
    request, answer = record.get("request") or {}, record.get("answer") or {}
    return sha256_of(
        {
            "receipt": record["receipt"],
            "prompt": request.get("prompt"),
            "finish_reason": answer.get("finish_reason"),
            "stop_reason": answer.get("stop_reason"),
        }
    )


def check_record(record: Mapping[str, Any]) -> None:
    """Whether a log line's request and answer are those of its receipt. Raises `BadReceipt` naming
    what was edited.
    """
    receipt = check_shape(record.get("receipt"))
    _no_others("a line", record, MEMBERS)
    try:
        if record.get("request") is not None:
            _check_request(receipt, record["request"])
        if record.get("answer") is not None:
            _check_answer(receipt, record["answer"])
        if "line_sha256" in record and record["line_sha256"] != line_digest(record):
            raise BadReceipt(
                "line_sha256 does not match: the receipt's other members, the prompt's text, "
                "finish_reason or stop_reason were edited"
            )
    except BadReceipt:
        raise
    except Exception as fault:
        kind = type(fault).__name__
        raise BadReceipt(f"request or answer is malformed ({kind}: {fault})") from None


def _check_request(receipt: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    _no_others("request", request, REQUEST)
    options = request["options"]
    _same("request_sha256", receipt, request_digest(request["prompt_token_ids"], options))
    for key in ("seed", "choice"):
        if key in receipt:
            _same(key, receipt, options[key])


def _check_answer(receipt: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    _no_others("answer", answer, ANSWER)
    digests = answer_digests(answer["token_ids"], answer["logprobs"], answer["text"])
    for key, value in digests.items():
        _same(key, receipt, value)
    _same("finish_reason", receipt, answer["finish_reason"])


def _no_others(where: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    if stray := sorted(set(found) - known):
        raise BadReceipt(f"{stray[0]!r} is no member of {where}: the line was edited")


def _same(key: str, receipt: Mapping[str, Any], found: Any) -> None:
    if receipt[key] != found:
        raise BadReceipt(f"{key} does not match the recorded content: the line was edited")


def _listed(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_listed(item) for item in value]
    return value
