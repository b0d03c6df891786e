"""Replay: asked again elsewhere and later, and every kind of difference found and named."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from server import replay
from server.comparison import compare, in_words, read_reply, same_bits
from server.engine import Prompt, Sampling
from server.minting import Minter
from server.receiptfile import Reader
from server.receiptlog import ReceiptLog
from server.receipts import request_digest
from server.signing import Signer
from tests.server.toy import ToyEngine, app, serving


def logging_to(path, engine, **options):
    header = {"fingerprint": engine.fingerprint, "tree": dict(engine.fingerprint_tree)}
    return Minter(engine, log=ReceiptLog(path, header, max_bytes=1 << 30), **options)


def make_log(path, count=30, tokens=12, engine=None, full=True, signer=None, **sampling):
    engine = engine or ToyEngine()
    minter = logging_to(path, engine, full=full, signer=signer)

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
    change(path, 5, lambda x: redigested(x.replace('"model":"toy"', '"model":"llama"')))
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


def test_digests_verify_and_do_not_replay(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    signer = Signer(Ed25519PrivateKey.generate())
    path = make_log(tmp_path / "r.jsonl", 3, full=False, signer=signer)
    key = ("--public-key", signer.public_key.upper())
    code, report = go("http://127.0.0.1:9", path, "--verify-only", *key)
    assert code == 0 and report["counts"] == {"verified": 3}
    assert report["compared"] == {"line": 3, "signature": 3}
    page = path.with_suffix(".replay.html").read_text()
    assert "Nobody was asked" in page and "came back" not in page.split("<h2>")[0]
    with serving(app(ToyEngine())) as url:
        code, report = go(url, path)
    assert code == 1 and report["counts"] == {"not_replayable": 3}
    change(path, 3, lambda x: x.replace('"created":1', '"created":2'))
    code, report = go("http://127.0.0.1:9", path, "--verify-only")
    assert code == 1 and report["counts"] == {"verified": 2, "edited": 1}
    assert go("http://127.0.0.1:9", path, "--verify-only", "--public-key", "zz")[0] == 2


def test_a_run_that_came_to_its_end_is_over(tmp_path):
    """The next one asks everything anew: of this server, or of another one."""
    path = make_log(tmp_path / "r.jsonl", 5)
    assert go("http://127.0.0.1:9", path, "--verify-only")[0] == 0
    for engine in (ToyEngine(), ToyEngine(), ToyEngine(flaw="seed")):
        with serving(app(engine, ids=False)) as url:
            code, _ = go(url, path)
        assert engine.asked >= 5 and code == (1 if engine.flaw else 0)


def stop_early(path):
    """As if the run that wrote these results had been stopped at its very end."""
    results = path.with_suffix(".results.jsonl")
    *kept, last = results.read_text().splitlines(keepends=True)
    assert json.loads(last) == {"complete": True}
    results.write_text("".join(kept))


def test_results_of_another_server_or_key_are_not_gone_on_with(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 3)
    with serving(app(ToyEngine(), ids=False)) as url:
        assert go(url, path)[0] == 0
    stop_early(path)
    with serving(app(ToyEngine(flaw="seed"), ids=False)) as url:
        assert go(url, path)[0] == 2
    assert go("http://127.0.0.1:9", path, "--verify-only", "--restart")[0] == 0
    stop_early(path)
    assert go("http://127.0.0.1:9", path, "--verify-only", "--public-key", "ab" * 32)[0] == 2
    with serving(app(ToyEngine(), ids=False)) as url:
        assert go(url, path)[0] == 2
        assert go(url, path, "--results", str(path))[0] == 2


def test_results_are_of_what_the_file_held(tmp_path, capfd):
    """After a rotation the same name holds other receipts."""
    path = make_log(tmp_path / "r.jsonl", 3)
    assert go("http://127.0.0.1:9", path, "--verify-only")[0] == 0
    stop_early(path)
    make_log(path, 1)  # grown: the lines that were there are there
    assert go("http://127.0.0.1:9", path, "--verify-only")[0] == 0
    stop_early(path)
    path.unlink()
    make_log(path, 5, tokens=3)
    assert go("http://127.0.0.1:9", path, "--verify-only")[0] == 2
    assert "rotated?" in capfd.readouterr().err


def test_a_log_that_grows_by_being_replayed_comes_to_an_end(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 20)
    engine = ToyEngine()
    with serving(app(engine, logging_to(path, engine))) as url:
        code, report = go(url, path, "--in-order", "--concurrency", "1")
    assert code == 0 and report["counts"] == {"equal": 20} and engine.asked == 20


def test_results_and_reports_are_no_receipts(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 2)
    assert go("http://127.0.0.1:9", path, "--verify-only")[0] == 0
    others = sorted(str(p) for p in tmp_path.glob("r*.jsonl") if p != path)
    assert len(others) == 1
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    assert replay.run(parser.parse_args(["--verify-only", *others, str(path)])) == 0
    assert replay.run(parser.parse_args(["--verify-only", *others])) == 2
    before = path.read_bytes()
    for flag in ("--results", "--report"):
        assert go("http://127.0.0.1:9", path, "--restart", flag, str(path))[0] == 2
    assert path.read_bytes() == before


def redigested(line, edit=lambda options: None):
    """A line whose digests hold, for a request as another program might have written it."""
    record = json.loads(line)
    edit(record["request"]["options"])
    del record["line_sha256"]
    found = request_digest(record["request"]["prompt_token_ids"], record["request"]["options"])
    record["receipt"]["request_sha256"] = found
    return json.dumps(record)


def test_a_request_of_a_later_version_is_not_asked_without_its_option(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 5)
    edits = [
        lambda o: o.update(dry_multiplier=0.8),
        lambda o: o.pop("max_tokens"),
        lambda o: o.update(structured=["json", "{"]),
        lambda o: o.update(structured=5),
    ]
    for number, edit in enumerate(edits, 2):
        change(path, number, lambda x, edit=edit: redigested(x, edit))
    with serving(app(ToyEngine())) as url:
        code, report = go(url, path)
    assert code == 1 and report["counts"]["equal"] == 1
    assert report["counts"]["unreadable"] == 4
    assert "dry_multiplier" in " ".join(f["fault"] for f in report["findings"])


def test_a_server_that_understood_another_request_is_caught(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 2)
    inner = ToyEngine()

    async def other(request):
        choice = {"index": 0, "text": "a", "finish_reason": "length"}
        receipts = [{"request_sha256": "0" * 64}]
        return JSONResponse({"choices": [choice], "samebits": {"receipts": receipts}})

    routes = [Route("/v1/completions", other, methods=["POST"]), *app(inner).routes]
    with serving(Starlette(routes=routes)) as url:
        code, report = go(url, path)
    assert code == 1 and report["counts"] == {"refused": 2}
    assert "another request" in report["findings"][0]["fault"]


HOSTILE = "[/b] \x1b[31m<script>alert(1)</script> \ud800"


def hostile(kind):
    """A foreign server whose answers are of the wrong kinds, or made to harm whoever reads them."""
    logprobs = {"token_logprobs": [-0.5], "tokens": [HOSTILE]}
    choice = {"index": 0, "text": HOSTILE, "finish_reason": HOSTILE, "logprobs": logprobs}
    changed = {
        "text": {"text": 5}, "ids": {"token_ids": ["a"]}, "ids2": {"token_ids": 7},
        "logprobs": {"logprobs": [1]}, "values": {"logprobs": {"token_logprobs": ["x"]}},
        "bool": {"logprobs": {"token_logprobs": [True]}}, "tokens": {"logprobs": {"tokens": "x"}},
        "huge": {"logprobs": {"token_logprobs": [10**400]}}, "finish": {"finish_reason": []},
        "words": {},
    }.get(kind, {})  # fmt: skip
    choices = [{**choice, **changed}, {**choice, **changed, "index": 1}]
    answer = {"choices": choices, "system_fingerprint": "fp"}
    raw = json.dumps(answer).encode()
    status, headers = 200, []
    if kind == "nan":
        raw = raw.replace(b"-0.5", b"NaN")
    elif kind == "deep":
        raw = b"[" * 100_000
    elif kind == "fingerprint":
        raw = json.dumps({**answer, "system_fingerprint": ["sb1-"]}).encode()
    elif kind == "message":
        raw, status = json.dumps({"error": {"message": HOSTILE}}).encode(), 400
    elif kind == "gzip":
        headers = [(b"content-encoding", b"gzip")]
    elif kind == "500":
        raw, status = json.dumps({"error": {"message": HOSTILE}}).encode(), 500

    async def serve(scope, receive, send):
        path, code = scope["path"], 200
        if path == "/v1/completions":
            body, code = raw, status
            extra = headers
        else:
            listed = {"data": [{"id": "toy"}, {"id": HOSTILE}, 5]} if "models" in path else {}
            body, extra = json.dumps(listed).encode(), []
        start = {"type": "http.response.start", "status": code, "headers": extra}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    return serve


@pytest.mark.parametrize(
    "kind",
    "text ids ids2 logprobs values bool tokens huge finish words nan deep fingerprint message gzip "
    "500".split(),
)
def test_a_foreign_server_can_not_break_the_replay(tmp_path, capfd, kind):
    path = make_log(tmp_path / "r.jsonl", 2)
    with serving(hostile(kind)) as url:
        code, report = go(url, path, "--patience", "30")
    assert code == 1
    (status,) = report["counts"]
    assert status == ("differs" if kind == "words" else "refused") and report["counts"][status] == 2
    page = path.with_suffix(".replay.html").read_text()
    assert "<script" not in page and "\x1b[31m" not in capfd.readouterr().err
    if kind in ("message", "500"):
        assert "[/b]" in report["findings"][0]["fault"]


def test_a_model_with_a_hostile_name(tmp_path, capfd):
    path = make_log(tmp_path / "r.jsonl", 1)
    with serving(hostile("words")) as url:
        code, report = go(url, path, "--model", "[/b]\x1b[31m")
    assert code == 1 and report["counts"] == {"other_model": 1}
    assert "\x1b[31m" not in capfd.readouterr().err


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:99999", "ftp://x", "http://\u0000"])
def test_base_urls_that_are_none(tmp_path, url):
    assert go(url, make_log(tmp_path / "r.jsonl", 1))[0] in (2, 3)


def test_a_source_that_can_not_be_read_on_the_way(tmp_path, monkeypatch):
    path = make_log(tmp_path / "r.jsonl", 3)

    def broken(self):
        yield next(self.whole())
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Reader, "whole", Reader.entries, raising=False)
    monkeypatch.setattr(Reader, "entries", broken)
    assert go("http://127.0.0.1:9", path, "--verify-only")[0] == 2
    assert go("http://127.0.0.1:9", path, "--api-key", "ключ")[0] == 2
    assert replay_of(tmp_path) == 2


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
    places = [json.loads(line).get("line") for line in results.read_text().splitlines()[1:-1]]
    assert len(places) == len(set(places)) == 60


def test_results_of_another_server_are_not_mixed_in(tmp_path):
    path = make_log(tmp_path / "r.jsonl", 3)
    with serving(app(ToyEngine())) as url:
        assert go(url, path)[0] == 0
    stop_early(path)
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
