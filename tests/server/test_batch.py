"""`samebits batch`: the server's own code on a file; nothing lost, nothing twice, whatever happens
in between.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import json

import httpx
import pytest

from config.settings import Settings
from server.app import create_app
from server.batch import DONE, FAILED, Batch, EngineGone, add_arguments, run
from server.batchfile import BadFile, Output, read_tasks
from server.errors import EngineDead
from tests.server.fake import FakeEngine


def line(custom_id, **body):
    body = {"prompt": "The future of AI", "max_tokens": 6, "temperature": 0.7, "seed": 42, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path, *lines):
    path.write_text("".join(json.dumps(item) + "\n" for item in lines))
    return path


def go(path, engine=None, output=None, **options):
    target = output or path.with_suffix(".out.jsonl")
    engine = engine or FakeEngine()

    async def opened(_):
        if isinstance(engine, Exception):
            raise engine
        return engine

    code = asyncio.run(Batch(path, target, **options).run(Settings(), opened))
    return code, answers(target)


def answers(target):
    """The lines by their custom_id, or by their number where they have none."""
    found = [json.loads(raw) for raw in target.read_text().splitlines()]
    named = {
        item["error"]["line"] if item["custom_id"] is None else item["custom_id"]: item
        for item in found
    }
    assert len(named) == len(found)
    return named


def test_format_and_same_answers_as_the_server(tmp_path):
    bodies = {
        "a": {"seed": 1, "logprobs": 2, "n": 2},
        "b": {"temperature": 0},
        "c": {"prompt": ["Hello", " the"], "echo": True},
    }
    code, found = go(write(tmp_path / "in.jsonl", *(line(k, **v) for k, v in bodies.items())))
    assert code == DONE and set(found) == set(bodies)

    async def served():
        async def opened(_):
            return FakeEngine()

        app = create_app(Settings(), opened)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                while app.state.service.engine is None:
                    await asyncio.sleep(0.01)
                return {
                    k: (await client.post("/v1/completions", json=line(k, **v)["body"])).json()
                    for k, v in bodies.items()
                }

    for key, body in asyncio.run(served()).items():
        item = found[key]
        assert set(item) == {"id", "custom_id", "response", "error"} and item["error"] is None
        response = item["response"]
        assert response["status_code"] == 200 and response["request_id"]
        assert response["body"]["choices"] == body["choices"]
        assert response["body"]["usage"] == body["usage"]


def test_plain_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('Hello\n\n"two\\nlines"\n"unfinished\n')
    code, found = go(path, defaults={"max_tokens": 2, "seed": 5, "echo": True})
    assert code == DONE
    texts = {k: v["response"]["body"]["choices"][0]["text"] for k, v in found.items()}
    assert texts["line-1"].startswith("Hello")
    assert texts["line-3"].startswith("two\nlines")
    assert texts["line-4"].startswith('"unfinished')


def test_chat_lines(tmp_path):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "seed": 1}
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    code, found = go(write(tmp_path / "in.jsonl", chat))
    if code == FAILED and found["c"]["response"]["status_code"] == 404:
        pytest.skip("chat is not routed yet")
    assert code == DONE and found["c"]["response"]["body"]["object"] == "chat.completion"


def test_bad_lines_say_why_and_the_others_are_answered(tmp_path):
    path = write(
        tmp_path / "in.jsonl",
        line("good"),
        line("nan", temperature=9),
        {**line("get"), "method": "GET"},
        {**line("url"), "url": "/v1/embeddings"},
        {**line("nobody"), "body": 3},
        line("stream", stream=True),
        {"body": {}},
        [],
    )
    with path.open("a") as file:
        file.write("{\n")
    code, found = go(path)
    assert code == FAILED
    assert found["good"]["response"]["status_code"] == 200
    assert found["nan"]["response"]["status_code"] == 400
    assert found["nan"]["response"]["body"]["error"]["param"] == "temperature"
    faults = {k: v["error"]["message"] for k, v in found.items() if v["error"]}
    assert set(faults) == {"get", "url", "nobody", "stream", 7, 8, 9}
    assert "custom_id" in faults[7] and "JSON" in faults[9]


def test_a_line_that_is_not_quite_json_does_not_end_the_batch(tmp_path):
    def odd(name, field):
        return json.dumps(line(name)).encode().replace(b'"max_tokens"', field + b', "max_tokens"')

    path = tmp_path / "in.jsonl"
    fields = {
        "nan": b'"min_p": NaN', "inf": b'"min_p": 1e999', "half": b'"user": "\\ud800"',
        "twice": b'"user": "a", "user": "b"', "digits": b'"n": ' + b"1" * 5000,
    }  # fmt: skip
    raw = [odd(name, field) for name, field in fields.items()]
    path.write_bytes(codecs.BOM_UTF8 + b"\n".join([*raw, json.dumps(line("good")).encode()]))
    code, found = go(path)
    assert code == FAILED
    assert found["good"]["response"]["status_code"] == 200
    for name, param in (("nan", "min_p"), ("inf", "min_p"), ("half", "user")):
        assert found[name]["response"]["status_code"] == 400
        assert found[name]["response"]["body"]["error"]["param"] == param
    assert "'user' stands twice" in found[4]["error"]["message"]
    assert "JSON" in found[5]["error"]["message"]
    path = tmp_path / "prompts.txt"
    path.write_text('one\n"\\ud800"\ntwo\n')
    code, found = go(path, defaults={"max_tokens": 2})
    assert code == FAILED
    assert [found[f"line-{i}"]["response"]["status_code"] for i in (1, 2, 3)] == [200, 400, 200]


def test_a_custom_id_like_a_made_up_name_is_another_line(tmp_path):
    """A line without a custom_id must not take the place of one that is called what it would be."""
    path = tmp_path / "in.jsonl"
    path.write_text(
        "{\n" + json.dumps(line("line-1")) + "\n" + json.dumps(line("line-4")) + "\n[]\n"
    )
    target = tmp_path / "out.jsonl"
    for _ in range(2):  # and again, going on after what is there
        code, found = go(path, output=target)
        assert code == FAILED and set(found) == {1, "line-1", "line-4", 4}
        assert found[1]["error"] and found[4]["error"]
        assert found["line-1"]["response"]["status_code"] == 200
        assert found["line-4"]["response"]["status_code"] == 200
    assert len(target.read_text().splitlines()) == 4


def test_a_line_beyond_the_time_limit_is_an_answer_not_the_end(tmp_path, monkeypatch):
    """The same line would stop every run at the same place."""
    path = write(tmp_path / "in.jsonl", line("slow", max_tokens=40), line("quick", max_tokens=1))
    monkeypatch.setenv("SAMEBITS_REQUEST_TIMEOUT_S", "0.3")
    code, found = go(path, FakeEngine(delay_s=0.02))
    assert code == FAILED and found["slow"]["response"]["status_code"] == 504
    assert found["quick"]["response"]["status_code"] == 200


def test_nobody_waits_for_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(Settings.model_fields["request_timeout_s"], "default", 0.2)
    Settings.model_rebuild(force=True)
    try:
        assert Settings().request_timeout_s == 0.2
        path = write(tmp_path / "in.jsonl", line("slow", max_tokens=40))
        code, _ = go(path, FakeEngine(delay_s=0.02))
        assert code == DONE
    finally:
        monkeypatch.undo()
        Settings.model_rebuild(force=True)


def test_resumes_after_a_kill(tmp_path):
    path = write(tmp_path / "in.jsonl", *(line(f"{i}", seed=i) for i in range(40)))
    _, whole = go(path, output=tmp_path / "whole.jsonl")
    raw = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    part = tmp_path / "part.jsonl"
    part.write_bytes(b"".join(raw[:17]) + raw[17][:50])  # killed within the eighteenth line
    engine = FakeEngine()
    code, found = go(path, engine, output=part)
    assert code == DONE and set(found) == set(whole)
    assert len(engine.started) == 40 - 17
    for key in whole:
        assert (
            found[key]["response"]["body"]["choices"] == whole[key]["response"]["body"]["choices"]
        )
    engine = FakeEngine()
    go(path, engine, output=part)
    assert not engine.started


def test_an_engine_that_dies_half_way_loses_nothing(tmp_path):
    path = write(tmp_path / "in.jsonl", *(line(f"{i}", seed=i) for i in range(30)))

    class Dying(FakeEngine):
        async def generate(self, prompt, sampling, *, request_id, priority=0, whole=False):
            if len(self.started) >= 12:
                raise EngineDead("gone")
            async for output in super().generate(prompt, sampling, request_id=request_id):
                yield output

    target = tmp_path / "out.jsonl"
    with pytest.raises(EngineGone):
        go(path, Dying(), output=target, concurrency=4)
    assert 0 < len(answers(target)) <= 12
    code, found = go(path, output=target)
    assert code == DONE and len(found) == 30


def test_an_engine_that_can_not_be_opened(tmp_path):
    with pytest.raises(EngineGone, match="no such model"):
        go(write(tmp_path / "in.jsonl", line("a")), RuntimeError("no such model"))


def test_many_more_lines_than_the_queue_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_MAX_QUEUE", "3")
    path = write(tmp_path / "in.jsonl", *(line(f"{i}", seed=i) for i in range(50)))
    engine = FakeEngine(delay_s=0.001)
    code, found = go(path, engine, concurrency=20)
    assert code == DONE and len(found) == 50 and engine.peak <= 3


def test_the_same_id_twice_is_answered_once_and_said(tmp_path, capsys):
    engine = FakeEngine()
    path = write(tmp_path / "in.jsonl", line("a"), line("a", prompt="other"), line("b"))
    code, found = go(path, engine)
    assert code == DONE and set(found) == {"a", "b"} and len(engine.started) == 2
    assert "1 lines not asked" in capsys.readouterr().err
    go(path, engine)
    assert "not asked" not in capsys.readouterr().err


def test_answers_of_another_fingerprint_are_not_mixed_in(tmp_path):
    path = write(tmp_path / "in.jsonl", line("a"))
    target = tmp_path / "out.jsonl"
    go(path, output=target)
    with pytest.raises(BadFile, match="sb_fake"):
        Output(target, "sb1-other")
    Output(target, "sb1-other", mix=True).close()


def test_a_file_of_something_else_is_left_alone(tmp_path):
    target = tmp_path / "notes.txt"
    target.write_text("do not touch\n")
    with pytest.raises(BadFile, match="another name"):
        Output(target, "sb_fake")
    assert target.read_text() == "do not touch\n"


def test_two_at_once_are_told_apart(tmp_path):
    first = Output(tmp_path / "out.jsonl", "f")
    with pytest.raises(BadFile, match="another batch"):
        Output(tmp_path / "out.jsonl", "f")
    first.close()
    Output(tmp_path / "out.jsonl", "f").close()


def test_arguments_are_checked_before_anything_is_loaded(tmp_path, capsys):
    path = write(tmp_path / "in.jsonl", line("a"))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for argv, word in [
        ([str(tmp_path / "absent"), "-o", "x"], "no such file"),
        ([str(path), "-o", str(path)], "same file"),
        ([str(path), "-o", str(tmp_path / "o"), "--body", "[]"], "--body"),
        ([str(path), "-o", str(tmp_path / "o"), "--body", "{"], "--body"),
        ([str(path), "-o", str(tmp_path / "o"), "--concurrency", "0"], "--concurrency"),
        ([str(path), "-o", str(tmp_path / "o"), "--max-num-seqs", "x"], "MAX_NUM_SEQS"),
    ]:
        assert run(parser.parse_args(argv)) == 2
        assert word in capsys.readouterr().err


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("x\n" * 100)
    tasks = read_tasks(path, {})
    assert next(tasks).custom_id == "line-1"
