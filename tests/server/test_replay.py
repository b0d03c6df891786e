"""Replay: asked again elsewhere and later, and every kind of difference found and named."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest

from server import replay
from server.comparison import compare, in_words, read_reply, same_bits
from server.engine import Prompt, Sampling
from server.minting import Minter
from server.receiptlog import ReceiptLog
from tests.server.toy import ToyEngine, app, serving


def make_log(path, count=30, tokens=12, engine=None, **sampling):
    engine = engine or ToyEngine()
    header = {"fingerprint": engine.fingerprint, "tree": dict(engine.fingerprint_tree)}
    minter = Minter(engine, log=ReceiptLog(path, header, max_bytes=1 << 30))

    async def ask():
        for i in range(count):
            options = Sampling(tokens, seed=i, choice=i % 3, **sampling)
            source = minter.over(engine, False)
            async for _ in source.generate(Prompt((1, i)), options, request_id="r"):
                pass

    asyncio.run(ask())
    return path


def go(url, path, *flags):
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    args = parser.parse_args([str(path), "--base-url", url, "--patience", "1", *flags])
    code = replay.run(args)
    report = path.with_suffix(".replay.json")
    return code, json.loads(report.read_text()) if report.exists() else {}


def replay_of(path):
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    return replay.run(parser.parse_args([str(path)]))


def change(path, line, edit):
    lines = path.read_text().splitlines()
    lines[line - 1] = edit(lines[line - 1])
    path.write_text("\n".join(lines) + "\n")


def test_everything_equal(tmp_path):
    path = make_log(tmp_path / "r.jsonl")
    with serving(app(ToyEngine())) as url:
        code, report = go(url + "/v1", path)
    assert code == 0 and report["clean"]
    assert report["counts"] == {"equal": 30}
    assert report["compared"] == {"token_ids": 30, "logprobs": 30, "text": 30, "finish_reason": 30}
    page = path.with_suffix(".replay.html").read_text()
    assert "bit for bit" in page and "<svg" in page
    assert "http" not in page.replace(url, "")


@pytest.mark.parametrize("flaw", ["batch", "seed"])
def test_a_planted_fault_is_found(tmp_path, flaw):
    path = make_log(tmp_path / "r.jsonl")
    with serving(app(ToyEngine(flaw=flaw, pause_s=0.001))) as url:
        code, report = go(url, path)
    assert code == 1 and report["counts"]["differs"] > 20
    first = report["findings"][0]["difference"]
    assert first["recorded"]["logprob"] != first["returned"]["logprob"]
    found = {int(token) for token in report["first_differences"]}
    assert min(found) >= 4 if flaw == "batch" else found == {0}
    assert 'class="bar"' in path.with_suffix(".replay.html").read_text()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"weights": "f" * 64}, "weights differ (model.safetensors)"),
        ({"dtype": "float32"}, "engine option dtype differs: bfloat16 / float32"),
        ({"kernel": "stock"}, "op aten::mm differs"),
    ],
)
def test_another_fingerprint_is_named(tmp_path, changes, word):
    path = make_log(tmp_path / "r.jsonl")
    with serving(app(ToyEngine(**changes))) as url:
        code, report = go(url, path)
    assert code == 1 and report["counts"] == {"other_fingerprint": 30}
    assert any(word in reason for reason in report["named_differences"])
    assert "the same all the same" in report["findings"][0]["words"]


def test_bad_lines_are_told_apart(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 8)
    change(path, 2, lambda x: x[:-20])
    change(path, 3, lambda x: x.replace('"text":" w', '"text":" v', 1))
    change(path, 4, lambda x: x.replace("samebits.receipt/1", "samebits.receipt/2"))
    change(path, 5, lambda x: x.replace('"model":"toy"', '"model":"llama"'))
    change(path, 6, lambda x: json.dumps({"receipt": json.loads(x)["receipt"]}))
    change(path, 7, lambda x: json.dumps(json.loads(x)["receipt"]))  # a bare receipt, from a header
    with serving(app(ToyEngine())) as url:
        code, report = go(url, path)
    counts = {"unreadable": 1, "edited": 2, "other_model": 1, "not_replayable": 2, "equal": 2}
    assert code == 1
    assert {k: v for k, v in report["counts"].items() if v} == counts
    said = " ".join(f.get("fault", "") for f in report["findings"])
    assert "samebits.receipt/2" in said and "text_sha256" in said and "'llama'" in said


def test_verify_only_needs_no_server(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 3)
    assert go("http://127.0.0.1:9", path, "--verify-only")[0] == 0
    change(path, 2, lambda x: x.replace('"seed":0', '"seed":7'))
    assert go("http://127.0.0.1:9", path, "--verify-only", "--restart")[0] == 1


def test_a_server_that_dies_half_way_and_comes_back(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 60)
    engine = ToyEngine(pause_s=0.002)
    inner = app(engine)

    async def dying(scope, receive, send):
        if scope["type"] == "http" and engine.asked >= 25:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body"})
        else:
            await inner(scope, receive, send)

    with serving(dying) as url:
        code, report = go(url, path, "--concurrency", "4")
    assert code == 3 and not report["complete"] and not report["clean"]
    first = report["counts"]["equal"]
    assert 20 <= first < 60
    results = path.with_suffix(".results.jsonl")
    with results.open("a") as file:
        file.write('{"source": "r.jso')  # and we were killed within a line
    again = ToyEngine()
    with serving(app(again)) as url:
        code, report = go(url, path)
    assert code == 0 and report["counts"] == {"equal": 60}
    assert again.asked == 60 - first
    places = [json.loads(line).get("line") for line in results.read_text().splitlines()[1:]]
    assert len(places) == len(set(places)) == 60


def test_results_of_another_server_are_not_mixed_in(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 3)
    with serving(app(ToyEngine())) as url:
        assert go(url, path)[0] == 0
    with serving(app(ToyEngine(dtype="float32"))) as url:
        assert go(url, path)[0] == 2
        assert go(url, path, "--restart")[0] == 1


def test_no_server_at_all(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 3)
    assert go("http://127.0.0.1:9", path)[0] == 3


def test_missing_and_empty_files(tmp_path):
    with serving(app(ToyEngine())) as url:
        (tmp_path / "empty.jsonl").touch()
        assert go(url, tmp_path / "empty.jsonl")[0] == 2
        assert replay_of(tmp_path / "absent.jsonl") == 2


def test_any_openai_compatible_server(tmp_path):
    """A server that knows no token ids, no choices by number and no fingerprints of ours: text and
    logprobs compare.
    """
    path = make_log(tmp_path / "r.jsonl", 9)
    with serving(app(ToyEngine(), ids=False)) as url:
        code, report = go(url, path)
    assert code == 0 and report["compared"] == {"logprobs": 9, "text": 9, "finish_reason": 9}
    with serving(app(ToyEngine(flaw="seed"), ids=False)) as url:
        code, report = go(url, path, "--restart")
    assert code == 1


def test_signed_receipts_only(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 2)
    with serving(app(ToyEngine())) as url:
        code, report = go(url, path, "--public-key", "ab" * 32)
    assert code == 1 and report["counts"] == {"edited": 2}
    assert "not signed" in report["findings"][0]["fault"]


ANSWER = {"token_ids": [1, 2], "logprobs": [-0.5, -1.0], "text": "ab", "finish_reason": "stop"}


def reply(**changes):
    logprobs = {"token_logprobs": changes.pop("logprobs", [-0.5, -1.0]), "tokens": ["a", "b"]}
    choice = {"index": 0, "text": "ab", "token_ids": [1, 2], "finish_reason": "stop"}
    return read_reply({"choices": [{**choice, "logprobs": logprobs, **changes}]}, 0)


def test_the_first_difference_and_both_sides():
    assert compare(ANSWER, reply()).difference is None
    for changed, kind, token in [
        ({"token_ids": [1, 3]}, "token", 1),
        ({"token_ids": [1]}, "token", 1),
        ({"token_ids": [1, 2, 3]}, "token", 2),
        ({"logprobs": [-0.5000000000000001, -1.0]}, "logprob", 0),
        ({"logprobs": [-0.5, None]}, "logprob", 1),
        ({"text": "aB"}, "text", 1),
        ({"finish_reason": "length"}, "finish_reason", 2),
        ({"token_ids": [1, 3], "logprobs": [-0.4, -1.0]}, "logprob", 0),
    ]:
        difference = compare(ANSWER, reply(**changed)).difference
        assert (difference["kind"], difference["token"]) == (kind, token), changed
        assert in_words(difference)
    with pytest.raises(ValueError):
        read_reply({"choices": []}, 0)


def test_logprobs_of_a_stop_text_that_was_cut_off():
    cut = {**ANSWER, "stop_reason": "b", "text": "a"}
    assert compare(cut, reply(text="a", logprobs=[-0.5])).difference is None
    assert compare({**cut, "stop_reason": None}, reply(text="a", logprobs=[-0.5])).difference


def test_bits_not_values():
    assert not same_bits(0.0, -0.0)
    assert same_bits(float("nan"), float("nan")) and same_bits(-1.5, -1.5)
