"""Tools in chat: which ones the model may or must call, and its answer as calls.

`none` hides the tools from the template. A named function and `required` are grammars: the answer
is the JSON of the arguments, or a JSON array of calls. `auto` is the model's own format, read by
the engine's parser.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.answers import Job
from server.engine import Engine, ModelInfo, ToolCall
from server.errors import InvalidRequest
from server.protocol_chat import ChatRequest, read_tools

_DATA = ("const", "enum", "default", "examples")  # in these a "$ref" is a text like any other


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`mode`: none | auto | required | named; `tools` are those that the template shows."""

    mode: str
    tools: tuple[dict[str, Any], ...] = ()
    name: str = ""
    several: bool = True

    def structured(self) -> tuple[str, str] | None:
        """The grammar that makes the model call, or None."""
        if self.mode == "named":
            tool = next(t for t in self.tools if t["function"]["name"] == self.name)
            return ("json", json.dumps(_parameters(tool)))
        if self.mode != "required":
            return None
        schema: dict[str, Any] = {
            "$defs": {str(i): _moved(_parameters(t), i) for i, t in enumerate(self.tools)},
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [_call_schema(t, i) for i, t in enumerate(self.tools)]},
        }
        if not self.several:
            schema["maxItems"] = 1
        return ("json", json.dumps(schema))


def plan(body: ChatRequest, info: ModelInfo) -> ToolPlan:
    """Read `tools` and `tool_choice`. Raises `InvalidRequest`."""
    tools = tuple(read_tools(body))
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return ToolPlan("none")
    if not tools:
        raise InvalidRequest("tool_choice: there are no tools", param="tool_choice")
    several = body.parallel_tool_calls
    if isinstance(choice, dict):
        return ToolPlan("named", tools, _named(choice, tools))
    if choice == "required":
        return ToolPlan("required", tools, several=several)
    if choice != "auto":
        raise InvalidRequest(
            "tool_choice: should be none, auto, required or a named function", param="tool_choice"
        )
    if info.tool_parser is None:
        raise InvalidRequest(
            "tool_choice: auto needs a parser for this model's calls (SAMEBITS_TOOL_CALL_PARSER); "
            "required and named functions work without one",
            param="tool_choice",
        )
    return ToolPlan("auto", tools, several=several)


def _named(choice: dict[str, Any], tools: Sequence[dict[str, Any]]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    known = [tool["function"]["name"] for tool in tools]
    if choice.get("type") != "function" or name not in known:
        raise InvalidRequest(
            "tool_choice: should name one of the tools", param="tool_choice.function.name"
        )
    return str(name)


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _moved(schema: Any, number: int) -> Any:
    """A function's schema as it must read under `#/$defs/{number}`: references to its own root
    (`#`, `#/$defs/Item`) lead there. What has an `$id` is a root of its own.
    """
    if isinstance(schema, list):
        return [_moved(part, number) for part in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    moved = {key: value if key in _DATA else _moved(value, number) for key, value in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        moved["$ref"] = f"#/$defs/{number}{ref[1:]}"
    return moved


def _call_schema(tool: dict[str, Any], number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [tool["function"]["name"]]},
            "parameters": {"$ref": f"#/$defs/{number}"},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


async def calls_of(
    found: ToolPlan, engine: Engine, text: str, token_ids: Sequence[int]
) -> tuple[str | None, tuple[ToolCall, ...]]:
    """(content, calls) of a whole answer. An answer that was cut short may hold no call: then the
    text is the content.
    """
    if found.mode == "none":
        return text, ()
    if found.mode == "named":
        return None, (ToolCall(found.name, text),)
    if found.mode == "auto":
        content, calls = await engine.parse_tools(text, found.tools, token_ids)
        return content, calls if found.several else calls[:1]
    try:
        listed = json.loads(text)
        calls = tuple(ToolCall(c["name"], json.dumps(c["parameters"])) for c in listed)
    except (ValueError, KeyError, TypeError, RecursionError):
        return text, ()
    return None, calls


def shown(calls: Sequence[ToolCall], job: Job) -> list[dict[str, Any]]:
    """The calls in OpenAI's shape.

    Ids are derived from the request (prompt, seed, choice), not random: templates may show them to
    the model in the next turn, and the same conversation must give the same prompt again.
    """
    return [
        {
            "id": call_id(job, index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def call_id(job: Job, index: int) -> str:
    """The id of a choice's call number `index`."""
    sampling = job.sampling
    key = f"{job.prompt.token_ids} {sampling.seed} {sampling.choice} {index}"
    return "call_" + hashlib.sha256(key.encode()).hexdigest()[:24]
