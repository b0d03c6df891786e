"""Chat templates and tool parsers of the model, through transformers and vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from config.settings import Settings
from server.engine import Prompt, ToolCall
from server.errors import EngineFailed, InvalidRequest


class Chat:
    """Renders messages with the model's own template, or the one that the settings name."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._parser = settings.tool_call_parser
        self._template: str | None = None
        if settings.chat_template is not None:
            self._template = Path(settings.chat_template).read_text(encoding="utf-8")

    @property
    def available(self) -> bool:
        """Whether there is a template at all."""
        return bool(self._template or getattr(self._tokenizer, "chat_template", None))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Messages as a prompt. Raises `InvalidRequest` when the template refuses them."""
        if not (self.available or chat_template):
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template",
                param="messages",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=None if tools is None else [dict(t) for t in tools],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template or self._template,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as fault:  # templates are programs: they raise whatever they like
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {fault}", param="messages"
            ) from fault
        return Prompt(tuple(int(i) for i in ids), str(text))

    def parse_tools(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]],
        token_ids: Sequence[int],  # noqa: ARG002
    ) -> tuple[str | None, tuple[ToolCall, ...]]:
        """An answer split into content and tool calls by vLLM's parser of that name."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        if self._parser is None:
            raise EngineFailed("no tool parser is configured")
        request = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": ""}], "tools": [dict(t) for t in tools]}
        )
        parser = ToolParserManager.get_tool_parser(self._parser)(self._tokenizer, request.tools)
        found = parser.extract_tool_calls(text, request)
        calls = tuple(
            ToolCall(c.function.name, c.function.arguments or json.dumps({}))
            for c in found.tool_calls
        )
        return found.content if found.tools_called else text, calls
