"""What every request body shares: strict types, null as absent, unknown and refused fields, common
sampling fields.

Ranges that never change stand here, as the types' own limits; those that are settings stand in
`server.limits`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from server.errors import InvalidRequest

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_CHOICE = 65535

Seed = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
Text = Annotated[str, Field(max_length=10_000)]
Anything = Annotated[Any, WithJsonSchema({})]
Object = dict[str, Any]

# For fields that change nothing in any answer: accepted, checked, documented as such.
HARMLESS = "accepted; has no effect on the answer"

# Fields that others serve and we do not: name -> (values that ask for nothing, reason).
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((False,), "beam search is not offered; it has no seeded meaning"),
    "length_penalty": ((1, 1.0), "it only acts in beam search, which is not offered"),
    "prompt_embeds": ((), "embeddings as prompts are not offered; send text or token ids"),
    "kv_transfer_params": ((), "KV transfer is not offered"),
    "vllm_xargs": (({},), "extra engine arguments could change the numerics"),
    "cache_salt": (
        (),
        "the prefix cache never changes an answer here, so there is nothing to salt",
    ),
    "logits_processors": (([],), "custom logits processors could change the numerics"),
    "repetition_detection": ((), "it is not proven reproducible; use stop or max_tokens"),
    "thinking_token_budget": ((), "it is not offered; use max_tokens"),
    "stream_interval": ((1,), "chunks leave as they come; their sizes carry no meaning"),
    "logprob_token_ids": (([],), "ask for logprobs instead"),
    "guided_json": ((), 'use "structured_outputs": {"json": …}'),
    "guided_regex": ((), 'use "structured_outputs": {"regex": …}'),
    "guided_choice": ((), 'use "structured_outputs": {"choice": […]}'),
    "guided_grammar": ((), 'use "structured_outputs": {"grammar": …}'),
    "mm_processor_kwargs": ((), "only text is served"),
}

_log = logging.getLogger("samebits.http")


class Body(BaseModel):
    """Base of all request bodies: exact types (true is no number, "7" no integer), finite numbers,
    frozen.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = REFUSED

    @classmethod
    def read(cls, raw: Mapping[str, Any], *, strict: bool) -> Self:
        """Validate. null is absent; the first fault is raised as `InvalidRequest` with the field's
        name.
        """
        given = {key: value for key, value in raw.items() if value is not None}
        for key in given.keys() - cls.model_fields.keys():
            cls._surplus(key, given[key], strict)
        try:
            return cls.model_validate(given)
        except ValidationError as fault:
            raise _invalid(fault) from None

    @classmethod
    def _surplus(cls, key: str, value: Any, strict: bool) -> None:
        shown = key[:100]
        if key in cls.refused:
            neutral, reason = cls.refused[key]
            if not any(value == v and type(value) is type(v) for v in neutral):
                raise InvalidRequest(f"{shown} is not supported: {reason}", param=shown)
            return
        near = difflib.get_close_matches(shown, cls.model_fields, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        message = f"unknown field {shown!r}{hint}"
        if strict:
            raise InvalidRequest(message, param=shown, code="unknown_parameter")
        _log.warning("%s (ignored: SAMEBITS_STRICT is off)", message)


def _invalid(fault: ValidationError) -> InvalidRequest:
    """The first fault of a body in words. The client's value is not repeated: it may be large, or
    not printable.
    """
    error = fault.errors(include_url=False, include_input=True)[0]
    param = ""
    for part in error["loc"]:
        param += f"[{part}]" if isinstance(part, int) else (f".{part}" if param else str(part))
    param = param[:200]
    if error["type"] == "missing":
        return InvalidRequest(
            f"{param} is required", param=param, code="missing_required_parameter"
        )
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] != "value_error" and error["type"].endswith(("_type", "_parsing")):
        message += f", not {_kind(error['input'])}"
    return InvalidRequest(f"{param}: {message}", param=param)


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), "this")


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SamplingFields(Body):
    """The fields that completions and chat share. Defaults are OpenAI's, never the model's
    generation_config.
    """

    model: Annotated[str | None, Field(max_length=1000)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1)] = 1
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    stop: Anything = None
    stream: bool = False
    stream_options: Anything = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: str = "left"
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: Object | None = None
    structured_outputs: Object | None = None
    priority: int = 0
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None
    # ours
    samebits_position_offset: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    samebits_choice: Annotated[int, Field(ge=0, le=MAX_CHOICE)] = 0  # number of the first choice
    samebits_receipt: bool = False
    # no effect on the answer
    user: Text | None = Field(None, description=HARMLESS)
    store: bool = Field(False, description=HARMLESS)
    metadata: Object | None = Field(None, description=HARMLESS)
    safety_identifier: Text | None = Field(None, description=HARMLESS)
    prompt_cache_key: Text | None = Field(None, description=HARMLESS)
    service_tier: Text | None = Field(None, description=HARMLESS)

    def options(self) -> StreamOptions:
        """`stream_options`, checked: only with `stream`, and no padding of chunks."""
        if self.stream_options is None:
            return StreamOptions()
        if not isinstance(self.stream_options, dict):
            raise InvalidRequest("stream_options: should be an object", param="stream_options")
        if not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        try:
            options = StreamOptions.read(self.stream_options, strict=True)
        except InvalidRequest as fault:
            fault.param = f"stream_options.{fault.param}"
            raise
        if options.include_obfuscation:
            raise InvalidRequest(
                "stream_options.include_obfuscation: chunks are not padded here; send false",
                param="stream_options.include_obfuscation",
            )
        return options
