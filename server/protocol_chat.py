"""The body of /v1/chat/completions: what OpenAI documents and what vLLM adds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from server.errors import InvalidRequest
from server.protocol import REFUSED, Anything, Object, SamplingFields

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
# Keys of a message that templates may use; and those that only stand in answers sent back.
_MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
_ANSWER_KEYS = {"refusal", "annotations", "audio", "function_call", "reasoning"}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_REFUSED_IN_CHAT = {
    "functions": ((), "use tools"),
    "function_call": ((), "use tool_choice"),
    "audio": ((), "only text is served"),
    "modalities": ((["text"],), "only text is served"),
    "prediction": ((), "predicted outputs are speculative decoding, which is not proven here"),
    "web_search_options": ((), "this server looks nothing up"),
    "reasoning_effort": ((), "pass the template's own switch in chat_template_kwargs"),
    "verbosity": ((), "ask for it in a message"),
    "documents": ((), "pass them in chat_template_kwargs"),
    "chat_template": ((), "the template is a setting (SAMEBITS_CHAT_TEMPLATE), not a request's"),
    "echo": ((False,), "use /v1/completions"),
    "best_of": ((1,), "answers are not ranked here"),
    "suffix": (("",), "use the messages"),
    "add_special_tokens": ((False,), "the chat template writes the special tokens"),
    "include_reasoning": ((True,), "the answer is shown whole"),
    "media_io_kwargs": ((), "only text is served"),
}


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {**REFUSED, **_REFUSED_IN_CHAT}

    messages: Annotated[list[Object], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: list[Object] = []
    tool_choice: Anything = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Object = {}

    def check(self) -> None:
        """Rules between fields. Raises `InvalidRequest`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs: true", param="top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                "max_tokens: differs from max_completion_tokens; send one", param="max_tokens"
            )
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message: needs add_generation_prompt: false",
                    param="continue_final_message",
                )
            if self.messages[-1].get("role") != "assistant":
                raise InvalidRequest(
                    "continue_final_message: the last message should be the assistant's",
                    param="continue_final_message",
                )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs: not with stream in chat", param="prompt_logprobs"
            )


def read_messages(body: ChatRequest, *, strict: bool) -> list[dict[str, Any]]:
    """The messages as templates expect them: contents as texts, arguments of tool calls as objects.

    Text parts are joined by a line break, `developer` becomes `system`. Raises `InvalidRequest`
    naming the place, such as "messages[2].content[0]".
    """
    return [_message(m, f"messages[{i}]", strict) for i, m in enumerate(body.messages)]


def _message(given: dict[str, Any], where: str, strict: bool) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if value is not None}
    if strict:
        _known(message, _MESSAGE_KEYS, _ANSWER_KEYS, where)
    role = message.get("role")
    if role not in ROLES:
        at = f"{where}.role"
        raise InvalidRequest(f"{at}: should be one of {', '.join(ROLES)}", param=at)
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    found["content"] = _content(message.get("content"), f"{where}.content", strict)
    if found["content"] is None and not (role == "assistant" and message.get("tool_calls")):
        at = f"{where}.content"
        raise InvalidRequest(f"{at}: is required", param=at, code="missing_required_parameter")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in message:
            if not isinstance(message[key], str):
                raise InvalidRequest(f"{where}.{key}: should be a text", param=f"{where}.{key}")
            found[key] = message[key]
    if message.get("tool_calls"):
        found["tool_calls"] = _past_calls(message["tool_calls"], f"{where}.tool_calls", strict)
    return found


def _content(content: Any, where: str, strict: bool) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where}: should be a text or a list of text parts", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            at = f"{where}[{index}]"
            raise InvalidRequest(
                f"{at}: only parts of type text are served, with the key text", param=at
            )
        if strict:
            _known(part, {"type", "text"}, {"annotations"}, f"{where}[{index}]")
        texts.append(text)
    return "\n".join(texts)


def _known(given: dict[str, Any], keys: set[str], empty: set[str], where: str) -> None:
    """Raises `InvalidRequest` on a key that no template would see; those of `empty` may be there,
    with nothing in them. `null` is absent.
    """
    for key in given.keys() - keys:
        if given[key] is None or (key in empty and not given[key]):
            continue
        at = f"{where}.{key[:100]}"
        raise InvalidRequest(f"{at}: unknown or not supported", param=at)


def _past_calls(calls: Any, where: str, strict: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}: should be a list", param=where)
    found = []
    for index, call in enumerate(calls):
        at = f"{where}[{index}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if strict and isinstance(function, dict):
            # `index` is where a call stood in a stream, which its place here says again
            _known(call, {"id", "type", "function", "index"}, set(), f"{where}[{index}]")
            _known(function, {"name", "arguments"}, set(), at)
        if isinstance(function, dict) and call.get("type", "function") != "function":
            kind = f"{where}[{index}].type"
            raise InvalidRequest(f"{kind}: should be function", param=kind)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{at}: should have a name and arguments", param=at)
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"{at}.arguments: should be the JSON text of an object", param=f"{at}.arguments"
            )
        named = {"name": function["name"], "arguments": arguments}
        found.append({"id": str(call.get("id", "")), "type": "function", "function": named})
    return found


def read_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """The tools, checked. Raises `InvalidRequest` naming the place."""
    if len(body.tools) > 128:
        raise InvalidRequest(f"tools: {len(body.tools)} tools; at most 128", param="tools")
    names: set[str] = set()
    for index, tool in enumerate(body.tools):
        where = f"tools[{index}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise InvalidRequest(f"{where}: should be of type function", param=where)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in names:
            at = f"{where}.function.name"
            raise InvalidRequest(f"{at}: should be a name of its own, 1 to 64 of A-Z a-z 0-9 _ . -",
                                 param=at)  # fmt: skip
        names.add(name)
        if not isinstance(function.get("parameters") or {}, dict):
            at = f"{where}.function.parameters"
            raise InvalidRequest(f"{at}: should be a JSON schema", param=at)
    return body.tools
