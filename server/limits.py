"""Limits that are settings, checked before any work; and the count of what is in the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from server.errors import Draining, InvalidRequest, NotFound, Overloaded
from server.protocol import MAX_CHOICE, SamplingFields

if TYPE_CHECKING:
    from config.settings import Settings
    from server.engine import ModelInfo

MAX_TOKEN_ID_LISTS = (
    4096  # entries of stop_token_ids; allowed_token_ids may name the whole vocabulary
)


def check_model(model: str | None, info: ModelInfo) -> None:
    """Raises `NotFound` for a model that is not the served one. None means the served one."""
    if model is not None and model != info.name and model not in info.aliases:
        raise NotFound(
            f"the model {model[:200]!r} does not exist; this server serves {info.name!r}",
            param="model",
            code="model_not_found",
        )


def check_counts(raw: Mapping[str, Any], settings: Settings) -> None:
    """Counts of entries, before any of them is looked at. Raises `InvalidRequest`."""
    for field, limit, unit in (
        ("logit_bias", settings.max_logit_bias, "entries"),
        ("bad_words", settings.max_bad_words, "entries"),
        ("stop", settings.max_stop, "stop texts"),
        ("stop_token_ids", MAX_TOKEN_ID_LISTS, "entries"),
    ):
        value = raw.get(field)
        if isinstance(value, list | dict):
            _at_most(field, len(value), limit, unit)


def check_sampling(body: SamplingFields, settings: Settings, info: ModelInfo) -> None:
    """Counts, lengths and token ids of the fields that completions and chat share. Raises
    `InvalidRequest`.
    """
    _at_most("n", body.n, settings.max_n)
    if body.samebits_choice + body.n - 1 > MAX_CHOICE:
        raise InvalidRequest(
            f"samebits_choice: with n the last choice is {body.samebits_choice + body.n - 1}; "
            f"at most {MAX_CHOICE}",
            param="samebits_choice",
        )
    for index, word in enumerate(body.bad_words):
        if not word.strip() or len(word) > settings.max_stop_chars:
            raise InvalidRequest(
                f"bad_words[{index}]: should have 1 to {settings.max_stop_chars} characters",
                param=f"bad_words[{index}]",
            )
    check_token_ids("stop_token_ids", body.stop_token_ids, info.vocab_size)
    if body.allowed_token_ids is not None:
        if not body.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids: is empty", param="allowed_token_ids")
        _at_most("allowed_token_ids", len(body.allowed_token_ids), info.vocab_size, "entries")
        check_token_ids("allowed_token_ids", body.allowed_token_ids, info.vocab_size)
    if body.prompt_logprobs is not None:
        _at_most("prompt_logprobs", body.prompt_logprobs, max_logprobs(settings, info))
    if body.priority != 0:
        raise InvalidRequest("priority: only 0 is served; all requests are equal", param="priority")
    if body.service_tier not in (None, "auto", "default"):
        raise InvalidRequest("service_tier: there is one tier, default", param="service_tier")
    if body.truncation_side not in ("left", "right"):
        raise InvalidRequest("truncation_side: should be left or right", param="truncation_side")
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens: should be -1 or at least 1", param="truncate_prompt_tokens"
        )


def check_text(text: str, body: SamplingFields, info: ModelInfo, where: str) -> None:
    """Raise on a text that is too long whatever its tokens are, before it is tokenized.

    The factor 4 is for normalizers that shorten texts.
    """
    most = 4 * info.max_model_len * info.max_token_chars
    if most and len(text) > most and body.truncate_prompt_tokens is None:
        raise InvalidRequest(
            f"{where}: {len(text)} characters; the context is {info.max_model_len} tokens",
            param=where,
            code="context_length_exceeded",
        )


def truncate(ids: Sequence[int], body: SamplingFields, room: int) -> Sequence[int]:
    """`truncate_prompt_tokens` applied: keep that many; -1: as many as fit beside max_tokens."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    keep = max(1, room) if keep == -1 else keep
    return ids[-keep:] if body.truncation_side == "left" else ids[:keep]


def check_context(ids: Sequence[int], max_tokens: int, max_model_len: int, where: str) -> None:
    """Raise `InvalidRequest` when a prompt is empty, or does not fit with its answer."""
    if not ids:
        raise InvalidRequest(f"{where}: has no tokens", param=where)
    if len(ids) + max_tokens > max_model_len:
        fits = len(ids) < max_model_len
        raise InvalidRequest(
            f"{where}: {len(ids)} tokens, with max_tokens {max_tokens} that is more than the "
            f"context of {max_model_len}",
            param="max_tokens" if fits else where,
            code="context_length_exceeded",
        )


def max_logprobs(settings: Settings, info: ModelInfo) -> int:
    """The most alternatives per token: the smaller of the setting and what the engine can."""
    return min(settings.max_logprobs, info.max_logprobs)


def read_stop(value: Any, settings: Settings) -> tuple[str, ...]:
    """`stop` as a tuple. Raises `InvalidRequest` on too long, empty or no texts."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise InvalidRequest("stop: should be a text or a list of texts", param="stop")
    for index, text in enumerate(stops):
        where = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}: should be a text", param=where)
        if not 1 <= len(text) <= settings.max_stop_chars:
            raise InvalidRequest(
                f"{where}: should have 1 to {settings.max_stop_chars} characters", param=where
            )
    return tuple(stops)


def read_logit_bias(body: SamplingFields, info: ModelInfo) -> tuple[tuple[int, float], ...]:
    """`logit_bias` by ascending token id. Raises `InvalidRequest` on keys that are no token ids."""
    found: dict[int, float] = {}
    for key, bias in body.logit_bias.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
        if not 0 <= token < info.vocab_size or token in found:
            raise InvalidRequest(
                f"logit_bias: {key[:40]!r} should be a token id from 0 to {info.vocab_size - 1}",
                param="logit_bias",
            )
        found[token] = bias
    return tuple(sorted(found.items()))


def _at_most(field: str, value: int, limit: int, unit: str = "") -> None:
    if value > limit:
        counted = f"{value} {unit}".strip()
        raise InvalidRequest(f"{field}: {counted}; at most {limit}", param=field)


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` naming the first entry that is outside the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{field}[{index}]: should be a token id from 0 to {vocab_size - 1}",
                param=f"{field}[{index}]",
            )


class Admission:
    """Counts the choices that are in the engine; refuses what would not fit, and everything while
    draining.
    """

    def __init__(self, settings: Settings) -> None:
        self._max_queue = settings.max_queue
        self._max_choices = min(settings.max_choices, settings.max_queue)
        self._batch = settings.max_num_seqs
        self.in_engine = 0
        self.draining = False

    @contextmanager
    def admit(self, choices: int) -> Iterator[None]:
        """Hold `choices` places. Raises `InvalidRequest` (never fits), `Overloaded` (not now) or
        `Draining`.
        """
        self.check(choices)
        self.in_engine += choices
        try:
            yield
        finally:
            self.in_engine -= choices

    def check(self, choices: int) -> None:
        """Raise what `admit` would raise, without holding anything."""
        if choices > self._max_choices:
            raise InvalidRequest(
                f"prompts × n is {choices}; at most {self._max_choices} in one request", param="n"
            )
        if self.draining:
            raise Draining("the server is shutting down", retry_after_s=5)
        if self.in_engine + choices > self._max_queue:
            waiting = max(0, self.in_engine - self._batch)
            raise Overloaded(
                f"{self.in_engine} choices are running or waiting; at most {self._max_queue}",
                retry_after_s=1 + waiting // max(1, self._batch),
            )
