"""A chat choice, whole (`Message`) or as it grows (`Delta`). Both show the same content and
calls.
"""

from __future__ import annotations

from typing import Any

from server import tools
from server.answers import Answer, Part, join
from server.engine import Engine
from server.logprobs import chat_logprobs
from server.protocol_chat import ChatRequest


class Message:
    """Builds a choice of a plain answer."""

    def __init__(self, body: ChatRequest, plan: tools.ToolPlan, answer: Answer) -> None:
        self._body, self._plan, self._answer = body, plan, answer

    async def choice(self, engine: Engine, whole: Part) -> dict[str, Any]:
        """The choice with its message."""
        content, calls = await tools.calls_of(self._plan, engine, whole.text, whole.token_ids)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = tools.shown(calls, self._answer.job)
        return {
            "index": self._answer.job.index,
            "message": message,
            **self._rest(whole, bool(calls)),
        }

    def _rest(self, part: Part, called: bool) -> dict[str, Any]:
        """What a whole choice and a delta have in common."""
        reason = part.finish_reason
        if called and reason == "stop" and self._plan.mode != "named":
            reason = "tool_calls"
        rest: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": part.stop_reason,
        }
        if self._body.logprobs and (part.entries or not self._body.stream):
            k = self._body.top_logprobs or 0
            rest["logprobs"] = chat_logprobs(part.entries, k, self._body.return_tokens_as_token_ids)
        if self._body.return_token_ids:
            rest["token_ids"] = part.token_ids
        return rest


class Delta(Message):
    """Builds the chunks of a streamed choice.

    Content and the arguments of a named function leave as they come. With `auto` and `required` the
    answer must be known whole before it is one thing or the other: it leaves at the end.
    """

    def __init__(self, body: ChatRequest, plan: tools.ToolPlan, answer: Answer) -> None:
        super().__init__(body, plan, answer)
        self._waiting: list[Part] | None = [] if plan.mode in ("auto", "required") else None
        self._begun = False

    async def choice(self, engine: Engine, whole: Part) -> dict[str, Any] | None:  # type: ignore[override]
        """The next chunk's choice, or None when there is nothing to say yet."""
        part, delta, called = whole, {}, False
        if not self._begun:
            delta["role"] = "assistant"
        if self._waiting is not None:
            self._waiting.append(part)
            if part.finish_reason is None:
                if self._begun:
                    return None
                part = Part(first=True)
                delta["content"] = ""
            else:
                part = join(self._waiting)
                called = await self._whole(engine, part, delta)
        elif self._plan.mode == "named":
            self._arguments(part, delta)
        elif part.text or not self._begun:
            delta["content"] = part.text
        if not (delta or part.entries or part.finish_reason or self._raw(part)):
            return None
        shown = {"index": self._answer.job.index, "delta": delta, **self._rest(part, called)}
        if self._body.return_token_ids and not self._begun:
            shown["prompt_token_ids"] = list(self._answer.job.prompt.token_ids)
        self._begun = True
        return shown

    def _raw(self, part: Part) -> bool:
        return self._body.return_token_ids and bool(part.token_ids)

    async def _whole(self, engine: Engine, part: Part, delta: dict[str, Any]) -> bool:
        content, calls = await tools.calls_of(self._plan, engine, part.text, part.token_ids)
        if content or not calls:
            delta["content"] = content or ""
        if calls:
            found = tools.shown(calls, self._answer.job)
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(found)]
        return bool(calls)

    def _arguments(self, part: Part, delta: dict[str, Any]) -> None:
        function: dict[str, Any] = {"arguments": part.text}
        call: dict[str, Any] = {"index": 0, "function": function}
        if not self._begun:
            function["name"] = self._plan.name
            call |= {"id": tools.call_id(self._answer.job, 0), "type": "function"}
        elif not part.text:
            return
        delta["tool_calls"] = [call]
