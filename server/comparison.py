"""Two answers side by side, bit for bit: the recorded one, and what a server returns now. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server returned for one choice. None: it does not return that."""

    token_ids: list[int] | None
    logprobs: list[float | None] | None
    tokens: list[str] | None
    text: str | None
    finish_reason: str | None
    fingerprint: str | None
    request_sha256: str | None = None  # of a server of ours: what it understood


@dataclass(frozen=True, slots=True)
class Verdict:
    """`difference` None: equal in everything that was compared. It holds the first place that
    differs.
    """

    compared: tuple[str, ...]
    difference: Mapping[str, Any] | None


def read_reply(body: Mapping[str, Any], index: int) -> Reply:
    """The choice `index` of a completion's body. Raises `ValueError` when there is none."""
    choices = body.get("choices")
    if not isinstance(choices, list):
        raise ValueError("the answer has no choices")
    found = [c for c in choices if isinstance(c, dict) and c.get("index") == index]
    if not found:
        raise ValueError(f"the answer has no choice {index}")
    choice = found[0]
    logprobs = _typed(choice, "logprobs", dict) or {}
    ours = body.get("samebits")
    receipts = ours.get("receipts") if isinstance(ours, dict) else None
    receipt = receipts[0] if isinstance(receipts, list) and receipts else None
    return Reply(
        token_ids=_listed(choice, "token_ids", int),
        logprobs=_floats(_listed(logprobs, "token_logprobs", (int, float, NoneType))),
        tokens=_listed(logprobs, "tokens", str),
        text=_typed(choice, "text", str),
        finish_reason=_typed(choice, "finish_reason", str),
        fingerprint=_typed(body, "system_fingerprint", str),
        request_sha256=receipt.get("request_sha256") if isinstance(receipt, dict) else None,
    )


def _typed(holder: Mapping[str, Any], key: str, kind: type) -> Any:
    value = holder.get(key)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"the answer's {key} is no {kind.__name__}")
    return value


def _listed(holder: Mapping[str, Any], key: str, kinds: type | tuple[type, ...]) -> Any:
    values = _typed(holder, key, list)
    if values and not all(isinstance(v, kinds) and not isinstance(v, bool) for v in values):
        raise ValueError(f"the answer's {key} has an entry of another type")
    return values


def _floats(values: list[float | None] | None) -> list[float | None] | None:
    try:
        found = values and [None if value is None else float(value) for value in values]
    except OverflowError:
        found = [math.inf]
    if found and not all(value is None or math.isfinite(value) for value in found):
        raise ValueError("the answer's token_logprobs has a number that is not finite")
    return found


def compare(answer: Mapping[str, Any], reply: Reply) -> Verdict:
    """The recorded answer against the reply, in everything that both hold."""
    compared = []
    first: Mapping[str, Any] | None = None
    if reply.token_ids is not None:
        compared.append("token_ids")
        first = _first_token(answer["token_ids"], reply.token_ids)
    if reply.logprobs is not None and answer["logprobs"] is not None:
        compared.append("logprobs")
        other = _first_logprob(_as_shown(answer, reply.logprobs), reply.logprobs)
        if other is not None and (first is None or other["token"] < first["token"]):
            first = other
    if first is not None:
        first = _with_both_sides(first, answer, reply)
    if reply.text is not None:
        compared.append("text")
        first = first or _first_character(answer["text"], reply.text, len(answer["token_ids"]))
    if reply.finish_reason is not None and answer.get("finish_reason") is not None:
        compared.append("finish_reason")
        if first is None and reply.finish_reason != answer["finish_reason"]:
            first = {
                "kind": "finish_reason",
                "token": len(answer["token_ids"]),
                "recorded": answer["finish_reason"],
                "returned": reply.finish_reason,
            }
    return Verdict(tuple(compared), first)


def held(record: Mapping[str, Any]) -> list[str]:
    """What of a line was verified, without asking anybody."""
    full = record.get("request") is not None and record.get("answer") is not None
    parts = {
        "content": full,
        "line": "line_sha256" in record,
        "signature": "signature" in record["receipt"],
    }
    return [name for name, there in parts.items() if there]


def in_words(difference: Mapping[str, Any]) -> str:
    """One line for people: where, and both sides."""
    kind = difference["kind"]
    if kind == "text":
        where = f"the text differs from character {difference['character']}"
        return f"{where}: {difference['recorded']!r} / {difference['returned']!r}"
    if kind == "finish_reason":
        return f"finish_reason: {difference['recorded']} / {difference['returned']}"
    where = f"token {difference['token']}" + (" (its logprob)" if kind == "logprob" else "")
    return f"{where}: {_side(difference['recorded'])} / {_side(difference['returned'])}"


def _side(side: Mapping[str, Any] | None) -> str:
    if side is None:
        return "nothing"
    name = side["token_id"] if "token_id" in side else repr(side.get("text"))
    return f"{name} with logprob {side['logprob']!r}" if "logprob" in side else str(name)


def same_bits(a: float, b: float) -> bool:
    """Equal as binary64 patterns: -0 is not 0, and a NaN equals itself."""
    return a == b != 0 or struct.pack(">d", a) == struct.pack(">d", b)


def _as_shown(answer: Mapping[str, Any], returned: Sequence[float | None]) -> Sequence[float]:
    """The recorded logprobs as far as a server shows them: those of a stop text that was cut off
    go unshown.
    """
    recorded: Sequence[float] = answer["logprobs"]
    cut = isinstance(answer.get("stop_reason"), str)
    return recorded[: len(returned)] if cut else recorded


def _first_token(recorded: Sequence[int], returned: Sequence[int]) -> dict[str, Any] | None:
    for index, (a, b) in enumerate(zip(recorded, returned, strict=False)):
        if a != b:
            return {"kind": "token", "token": index}
    if len(recorded) != len(returned):
        return {"kind": "token", "token": min(len(recorded), len(returned))}
    return None


def _first_logprob(
    recorded: Sequence[float], returned: Sequence[float | None]
) -> dict[str, Any] | None:
    for index, (a, b) in enumerate(zip(recorded, returned, strict=False)):
        if b is None or not same_bits(a, b):
            return {"kind": "logprob", "token": index}
    if len(recorded) != len(returned):
        return {"kind": "logprob", "token": min(len(recorded), len(returned))}
    return None


def _with_both_sides(
    first: Mapping[str, Any], answer: Mapping[str, Any], reply: Reply
) -> dict[str, Any]:
    index = first["token"]
    return {
        **first,
        "recorded": _at(index, answer["token_ids"], answer["logprobs"], None),
        "returned": _at(index, reply.token_ids, reply.logprobs, reply.tokens),
    }


def _at(
    index: int,
    token_ids: Sequence[int] | None,
    logprobs: Sequence[float | None] | None,
    tokens: Sequence[str] | None,
) -> dict[str, Any] | None:
    """What stands at one place of one side; None past its end."""
    known = token_ids if token_ids is not None else logprobs
    if known is None or index >= len(known):
        return None
    side: dict[str, Any] = {}
    for key, values in (("token_id", token_ids), ("logprob", logprobs), ("text", tokens)):
        if values is not None and index < len(values):
            side[key] = values[index]
    return side


def _first_character(recorded: str, returned: str, num_tokens: int) -> dict[str, Any] | None:
    if recorded == returned:
        return None
    same = next(
        (i for i, (a, b) in enumerate(zip(recorded, returned, strict=False)) if a != b),
        min(len(recorded), len(returned)),
    )
    # Without token ids the place along the answer is an estimate, by the share of characters.
    token = int(num_tokens * same / max(len(recorded), 1))
    around = slice(max(same - 10, 0), same + 10)
    return {
        "kind": "text",
        "token": token,
        "character": same,
        "recorded": recorded[around],
        "returned": returned[around],
    }
