"""What the routes know of an engine: requests in, outputs out. No vLLM and no torch here.

One `generate` call is one prompt and one choice; the handlers fan out over prompts and `n`. That
keeps the seed's meaning in one place: choice `i` of a request is the pair (seed, i), whatever else
is asked for in the same body.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Sampling:
    """The effective options of one choice: what was run, after every default. Frozen, and what
    receipts digest.

    `temperature == 0` is greedy. `seed` is an int64 and never None here: the server has assigned
    one if the client sent none. `choice` is the index within `n`. `position_offset` is the number
    of answer tokens that came before this prompt's end (continuation); the draw for answer token t
    uses position t + position_offset.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position_offset: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None  # number of alternatives; 0: the sampled token only; None: off
    prompt_logprobs: int | None = None
    structured: tuple[str, str] | None = (
        None  # (kind, text): json | regex | choice | grammar | json_object
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as the model sees them, and the text they came from where there was one."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its raw log-probability: log-softmax of the logits before temperature,
    penalties and filters.

    `text` is the token decoded in its place, or `bytes:\\xNN…` when it is no whole UTF-8 (a part of
    a character): the texts of an answer's tokens, one after the other, are the answer's text. A
    special token has its own spelling ("</s>"), shown or not. `rank` is 1 for the most likely one.
    """

    token_id: int
    logprob: float
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Position:
    """The logprobs at one position: the token that stands there, and the k most likely ones, most
    likely first.
    """

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """One step of one choice. `text` and `token_ids` are what is new since the last step.

    The engine never yields text that a later step could take back: half a character, or the
    beginning of a stop string, is held until it is known. `finish_reason` is set on the last
    output: "stop" | "length" | "abort".
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Position, ...] | None = None
    prompt_logprobs: tuple[Position | None, ...] | None = (
        None  # first output only; None at position 0
    )
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    receipt: Mapping[str, Any] | None = None  # last output only, where one was minted (minting.py)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served. `created` is the unix time of the start."""

    name: str
    aliases: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    created: int
    max_logprobs: int = 20
    eos_token_ids: tuple[int, ...] = ()
    max_token_chars: int = 0  # characters of the longest token; 0: unknown
    special_token_ids: frozenset[int] = frozenset()  # those that skip_special_tokens skips
    has_chat_template: bool = True
    tool_parser: str | None = None  # name of the parser behind `parse_tools`; None: no `auto` tools


@dataclass(frozen=True, slots=True)
class Health:
    """`ready`: verified and stepping. `reason` says why not. `report` is the per-rank check of the
    ops.
    """

    alive: bool
    ready: bool
    reason: str = ""
    determinism: str = "on"
    device: str = "cpu"
    device_reason: str = ""
    num_running: int = 0
    num_waiting: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as the model asked for it; `arguments` is the JSON text it wrote."""

    name: str
    arguments: str


class Engine(Protocol):
    """All that the handlers may call. Errors raised are those of `server.errors` and nothing
    else.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def fingerprint(self) -> str:
        """Short hash over everything that decides bits; goes out as `system_fingerprint`."""
        ...

    @property
    def fingerprint_tree(self) -> Mapping[str, Any]:
        """What the hash was taken over."""
        ...

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]: ...

    async def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False
    ) -> str: ...

    def token_text(self, token_id: int) -> str:
        """The token's own spelling (for `tokens` arrays): text, or `bytes:\\xNN…` when it is no
        whole UTF-8.
        """
        ...

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Messages through the model's chat template. Raises `InvalidRequest` when the template
        refuses them.
        """
        ...

    async def parse_tools(
        self, text: str, tools: Sequence[Mapping[str, Any]], token_ids: Sequence[int] = ()
    ) -> tuple[str | None, tuple[ToolCall, ...]]:
        """A whole answer split into its content and its tool calls, by `info.tool_parser`. An
        answer without calls comes back as it is. Only called when `info.tool_parser` is set.
        """
        ...

    async def grammar_fault(self, kind: str, text: str) -> str:
        """Why no answer can follow this grammar (`Sampling.structured`); "" when one can."""
        ...

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        request_id: str,
        priority: int = 0,
        whole: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """Start nothing until iterated; closing the iterator (or cancelling) stops the work in the
        engine.

        `whole`: one output at the end instead of one a step, where that saves work.
        `sampling.max_tokens == 0` scores the prompt: one output with `prompt_logprobs`, no tokens,
        and finish_reason "length". No context manager may be open across a yield that is bound to a
        task (asyncio.timeout, TaskGroup): the first output may be awaited in another task.

        `request_id` is made by the server, unique in the process; never a client's string.
        """
        ...

    def health(self) -> Health: ...

    def metrics_text(self) -> bytes:
        """The engine's own Prometheus exposition (may be empty)."""
        ...

    async def close(self) -> None: ...
