"""Every field of both endpoints: absent, null, lowest, highest, outside, wrong type."""

from __future__ import annotations

from typing import Any

import pytest

from server.protocol import REFUSED, SamplingFields
from server.protocol_chat import ChatRequest
from server.protocol_completions import CompletionRequest
from tests.server.fake import VOCAB
from tests.server.live import Live

BIG = 10**30
# field: (values that are served, values that are a 400)
NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, 1e-4, 1, 2], [-0.01, 2.01, "1", True, [1], BIG]),
    "top_p": ([0, 0.01, 1], [-0.1, 1.1, "1", True]),
    "seed": (
        [-(2**63), -2, -1, 0, 1, 2**63 - 1],
        [-(2**63) - 1, 2**63, 2**64 - 1, 2**64, 1.5, "7", True, [1], {}],
    ),
    "n": ([1, 2, 128], [0, -1, 129, 16385, 10**9, 1.0, "1", True]),
    "presence_penalty": ([-2, 0, 2], [-2.1, 2.1, "0", True]),
    "frequency_penalty": ([-2, 0, 2], [-2.1, 2.1, "0", True]),
    "logit_bias": (
        [{}, {"5": 100}, {"5": -100, "6": 1.5}],
        [{str(VOCAB): 1}, {"-1": 5}, {"abc": 1}, {"5": 1000}, {"5": None}, {"5": "1"}, [1], "x",
         {"٣": 1}, {"5": 1, "05": 2}],
    ),
    "stop": (
        ["x", ["x"], [], ["a", "b", "c", "d"], "y" * 1024],
        ["", [""], ["a"] * 5, [1], 1, {"a": 1}, "y" * 1025, [None], ["a"] * 1000],
    ),
    "stream": ([False], ["true", 1, 0]),
    "stream_options": ([], [{"include_usage": True}, {}, 1, "x"]),
    "top_k": ([-1, 0, 1, 1000, 2**63 - 1], [-2, 1.5, "1", True, 2**63, BIG]),
    "min_p": ([0, 1], [-0.1, 1.1, "0"]),
    "repetition_penalty": ([0.01, 1, 100], [0, -1, 101, "1"]),
    "min_tokens": ([0, 2], [-1, 10**6, 1.5, True]),
    "stop_token_ids": ([[], [0, VOCAB - 1]], [[VOCAB], [-5], [10**9], ["1"], [True], [1.0], 5]),
    "include_stop_str_in_output": ([True, False], [1, "true"]),
    "ignore_eos": ([True, False], [1, "true"]),
    "skip_special_tokens": ([True, False], [1, "true"]),
    "spaces_between_special_tokens": ([True, False], [1, "true"]),
    "allowed_token_ids": ([[0], [5, VOCAB - 1]], [[], [VOCAB], [-1], ["1"], 5]),
    "bad_words": ([[], ["a", "b"]], [[""], [" "], "a", [1], ["x"] * 257, ["x" * 1025]]),
    "truncate_prompt_tokens": ([-1, 1, 5], [0, -2, 1.5, "1"]),
    "truncation_side": (["left", "right"], ["middle", 1]),
    "prompt_logprobs": ([0, 20], [-1, 21, True, "1"]),
    "return_token_ids": ([True, False], [1, "true"]),
    "return_tokens_as_token_ids": ([True, False], [1, "true"]),
    "response_format": (
        [{"type": "text"}, {"type": "json_object"},
         {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}],
        [{}, {"type": "xml"}, {"type": "json_schema"}, "text", [],
         {"type": "json_object", "schema": {"type": "array"}}, {"type": "text", "x": 1},
         {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}},
         {"type": "json_schema", "json_schema": {"schema": {}, "shcema": 1}},
         {"type": "json_schema", "json_schema": {"schema": {"const": "refuse"}}}],
    ),
    "structured_outputs": (
        [{"json": {"type": "object"}}, {"json": "{}"}, {"regex": "a+"}, {"choice": ["a", "b"]},
         {"grammar": "root ::= x"}, {"json_object": True}],
        [{}, {"xml": 1}, {"regex": 1}, {"choice": []}, {"choice": [1]}, {"json": "{"},
         {"json": {}, "regex": "a"}, "x", {"json_object": 1}, {"json_object": "no"},
         {"json": '{"a": 1, "a": 2}'}, {"json": '{"const": NaN}'}, {"json": '{"a": 1e999}'},
         {"json": '{"const": "\\ud800"}'}, {"json": '{"a":' * 99 + "1" + "}" * 99},
         {"regex": "refuse"}, {"choice": ["refuse"]}],
    ),
    "priority": ([0], [1, -1, "0", True]),
    "request_id": (["abc-1"], ["", "a b", "é", "x" * 129, "a\nb", 5]),
    "samebits_position_offset": ([0, 2**31 - 1], [-1, 2**31, 1.0, "0"]),
    "samebits_choice": ([0, 65535], [-1, 65536, 1.0, "0"]),
    "samebits_receipt": ([False], [1, "true"]),
    "user": (["me"], [5, "x" * 10_001]),
    "store": ([True, False], ["true", 1]),
    "metadata": ([{"a": "b"}], ["x", []]),
    "safety_identifier": (["me"], [5]),
    "prompt_cache_key": (["me"], [5]),
    "service_tier": (["auto", "default"], ["flex", "priority", 5]),
    "model": (["fake", "org/fake-7b"], [5, True, "x" * 1001]),
}  # fmt: skip
COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "prompt": (
        ["a", ["a", "b"], [1, 2, 3], [[1, 2], [3]], [VOCAB - 1], [0]],
        ["", [""], [], [[]], ["a", ""], ["a", [1]], [[1], "a"], [-1], [VOCAB], [1.0], [True],
         [10**20], 5, True, {}, [None], [[1], [VOCAB]], [1] * 600, ["a"] * 257],
    ),
    "max_tokens": ([1, 16, 500], [-1, 0, 10**9, 1.0, "1", True, 600]),
    "echo": ([True, False], [1, "true"]),
    "logprobs": ([0, 1, 5, 20], [-1, 21, True, False, "1", 1.0]),
    "best_of": ([1], [0, 2, 3, "1", True]),
    "suffix": ([""], ["x", 5]),
    "add_special_tokens": ([True, False], [1]),
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAY = {"role": "user", "content": "Hello"}
CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    "messages": (
        [[SAY], [{"role": "system", "content": "a"}, SAY], [{"role": "developer", "content": "a"}],
         [{"role": "user", "content": [{"type": "text", "text": "a", "annotations": []}]}],
         [SAY, {"role": "assistant", "content": None, "tool_calls": [
             {"id": "c", "index": 0, "type": "function",
              "function": {"name": "f", "arguments": "{}"}}]},
          {"role": "tool", "tool_call_id": "c", "content": "5"}]],
        [[], "Hello", [5], [{}], [{"role": "user"}], [{"role": "king", "content": "a"}],
         [{"role": "user", "content": 5}], [{"role": "user", "content": []}],
         [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
         [{"role": "user", "content": "a", "colour": "red"}],
         [{"role": "user", "content": [{"type": "text", "text": "a", "colour": "red"}]}],
         [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
         [{"role": "assistant", "tool_calls": [
             {"type": "custom", "function": {"name": "f", "arguments": "{}"}}]}],
         [{"role": "assistant", "tool_calls": [
             {"function": {"name": "f", "arguments": "{}"}, "colour": 1}]}],
         [{"role": "assistant", "tool_calls": [
             {"function": {"name": "f", "arguments": "{}", "colour": 1}}]}]],
    ),
    "max_tokens": ([1, 200], [0, -1, 10**9, 1.0, True]),
    "max_completion_tokens": ([2], [0, -1, 10**9, 1.0, True, 7]),
    "logprobs": ([True, False], [1, 0, "true"]),
    "top_logprobs": ([], [0, 5, 21, -1, True]),
    "tools": ([[]], [[TOOL], [5], [{}], "x", [TOOL, TOOL], [{"type": "magic"}]]),
    "tool_choice": (["none"], ["auto", "required", "all", 5,
                               {"type": "function", "function": {"name": "g"}}]),
    "parallel_tool_calls": ([True, False], [1]),
    "add_generation_prompt": ([True, False], [1]),
    "continue_final_message": ([False], [True, 1]),
    "chat_template_kwargs": ([{}, {"a": 1}], ["x", []]),
}  # fmt: skip


def _cases(own: dict[str, tuple[list[Any], list[Any]]], good: bool) -> list[Any]:
    table = {**NUMBERS, **own}
    return [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, sides in table.items()
        for i, value in enumerate(sides[0 if good else 1])
    ]


def _completion(live: Live, **body: Any) -> Any:
    return live.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2, "seed": 1, **body})


def _chat(live: Live, **body: Any) -> Any:
    default = {"messages": [SAY], "max_tokens": 2, "seed": 1}
    return live.post("/v1/chat/completions", {**default, **body})


def _refused(answer: Any, field: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    related = {"max_completion_tokens": "max_tokens", "tools": "tool_choice"}
    assert (error["param"] or "").startswith((field, related.get(field, field))), error
    assert field.split("[")[0] in error["message"] or related.get(field, "-") in error["message"]


@pytest.mark.parametrize(("field", "value"), _cases(COMPLETIONS, good=True))
def test_completions_serve(live: Live, field: str, value: Any) -> None:
    answer = _completion(live, **{field: value})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("field", "value"), _cases(COMPLETIONS, good=False))
def test_completions_refuse(live: Live, field: str, value: Any) -> None:
    _refused(_completion(live, **{field: value}), field)


@pytest.mark.parametrize(("field", "value"), _cases(CHAT, good=True))
def test_chat_serves(live: Live, field: str, value: Any) -> None:
    extra = {"max_tokens": None} if field == "max_completion_tokens" else {}
    answer = _chat(live, **extra, **{field: value})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("field", "value"), _cases(CHAT, good=False))
def test_chat_refuses(live: Live, field: str, value: Any) -> None:
    _refused(_chat(live, **{field: value}), field)


def test_the_tables_name_every_field() -> None:
    assert {**NUMBERS, **COMPLETIONS}.keys() == CompletionRequest.model_fields.keys()
    assert {**NUMBERS, **CHAT}.keys() == ChatRequest.model_fields.keys()
    assert NUMBERS.keys() == SamplingFields.model_fields.keys()


@pytest.mark.parametrize("field", [*CompletionRequest.model_fields, *REFUSED])
def test_null_is_absent(live: Live, field: str) -> None:
    if field == "prompt":
        assert _completion(live, prompt=None).json()["error"]["param"] == "prompt"
        return
    body = {"prompt": "Hello", "seed": 1}
    body.pop(field, None)
    absent = live.complete(**body)
    null = live.complete(**body, **{field: None})
    if field == "seed":
        assert null["samebits"]["seed_from"] == absent["samebits"]["seed_from"] == "assigned"
        return
    assert null["choices"] == absent["choices"]
    assert null["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("field", [f for f in ChatRequest.model_fields if f != "messages"])
def test_null_is_absent_in_chat(live: Live, field: str) -> None:
    body = {"messages": [SAY], "max_tokens": 3, "seed": 1}
    body.pop(field, None)
    if field == "max_tokens":
        body["max_completion_tokens"] = 3
    absent = live.post("/v1/chat/completions", body).json()
    null = live.post("/v1/chat/completions", {**body, field: None}).json()
    if field != "seed":
        assert null["choices"] == absent["choices"]


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_served_says_so(live: Live, field: str) -> None:
    _refused(_completion(live, **{field: "something"}), field)
    for neutral in REFUSED[field][0]:
        assert _completion(live, **{field: neutral}).status_code == 200


def test_the_last_choice_stays_within_what_can_be_asked_again(live: Live) -> None:
    assert _completion(live, samebits_choice=65533, n=3).status_code == 200
    _refused(_completion(live, samebits_choice=65534, n=3), "samebits_choice")


def test_the_receipts_header_is_read_strictly(live: Live) -> None:
    for values, status in (
        (["1"], 200),
        (["0"], 200),
        (["true"], 400),
        ([""], 400),
        (["1", "0"], 400),
    ):
        headers = [("X-Samebits-Receipt", value) for value in values]
        for path, body in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [SAY], "max_tokens": 1}),
        ):
            answer = live.http.post(path, json=body, headers=headers)
            assert answer.status_code == status, values
            if status == 400:
                assert answer.json()["error"]["param"] == "X-Samebits-Receipt"


def test_a_tool_whose_schema_is_refused_is_named(live: Live) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"const": "refuse"}}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        answer = _chat(live, tools=[tool], tool_choice=choice)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"


def test_an_answer_must_not_outlive_its_grammar(live: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x"]}}}
    tool = {"type": "function", "function": {"name": "f"}}
    for wanted in (
        {"structured_outputs": {"choice": ["x"]}},
        {"response_format": {"type": "json_object"}},
        {"response_format": form},
    ):
        for call in (_completion, _chat):
            _refused(call(live, ignore_eos=True, **wanted), "ignore_eos")
            assert call(live, ignore_eos=False, **wanted).status_code == 200
    _refused(_chat(live, ignore_eos=True, tools=[tool], tool_choice="required"), "ignore_eos")
    form = {"type": "text"}
    assert _completion(live, ignore_eos=True, response_format=form).status_code == 200


def test_a_misspelt_field_is_named(live: Live) -> None:
    error = _completion(live, sede=5).json()["error"]
    assert error["param"] == "sede"
    assert "did you mean seed?" in error["message"]
    error = _completion(live, max_completion_tokens=5).json()["error"]
    assert error["param"] == "max_completion_tokens"


def test_an_unknown_model_is_a_404(live: Live) -> None:
    for call in (_completion, _chat):
        answer = call(live, model="gpt-4")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
