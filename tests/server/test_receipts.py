"""Receipts: the digests say what the documentation says, and every edit is noticed."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

import httpx
import pytest

from config.settings import Settings
from server import canonical, fingerprint, receipts, signing
from server.app import create_app
from server.engine import Output, Position, Prompt, Sampling, TokenLogprob
from server.errors import EngineFailed
from server.minting import BadPlace, Minter, check_places
from server.receiptfile import Reader
from server.receiptlog import ReceiptLog
from tests.server.fake import FakeEngine
from tests.server.toy import ToyEngine, serving

VECTORS = json.loads(
    (Path(__file__).parents[2] / "docs" / "receipts-vectors.json").read_text(encoding="utf-8")
)


async def answer(engine, minter, sampling, prompt=(1, 2, 3), wanted=True):
    source = minter.over(engine, wanted)
    return [o async for o in source.generate(Prompt(tuple(prompt)), sampling, request_id="r")]


def test_canonical_vectors():
    for vector in VECTORS["canonical"]:
        assert canonical.encode(vector["value"]).decode() == vector["bytes"]
        assert canonical.sha256_of(vector["value"]) == vector["sha256"]


def test_receipt_vectors():
    for vector in VECTORS["receipts"]:
        request, got = vector["request"], vector["answer"]
        assert (
            receipts.request_digest(request["prompt_token_ids"], request["options"])
            == vector["receipt"]["request_sha256"]
        )
        digests = receipts.answer_digests(got["token_ids"], got["logprobs"], got["text"])
        assert digests.items() <= vector["receipt"].items()
        receipts.check_record(vector)


def test_vectors_of_a_signature():
    for vector in VECTORS["signed"]:
        assert signing.verify(vector, vector["signature"]["public_key"]) is None


def test_canonical_refuses_what_has_no_one_form():
    for value in (math.nan, math.inf, {1: 2}, {1, 2}, b"x", object()):
        with pytest.raises((TypeError, ValueError)):
            canonical.encode(value)


def test_every_option_of_schema_1_is_known():
    """A field that Sampling gains must be thought about: it is left out of digests only while it
    is not set.
    """
    names = {f.name for f in dataclasses.fields(Sampling)}
    assert set(receipts.OPTIONS) | receipts.OBSERVING <= names
    plain = receipts.options_of(Sampling(8))
    assert set(plain) == set(receipts.OPTIONS)
    for name in names - receipts.OBSERVING - set(receipts.OPTIONS):
        assert name not in plain


@pytest.mark.parametrize("name", receipts.OPTIONS)
def test_each_option_changes_the_request_digest(name):
    base = Sampling(8)
    value = getattr(base, name)
    if isinstance(value, bool):
        changed = not value
    elif isinstance(value, int | float):
        changed = value + 1
    else:
        changed = {
            "logit_bias": ((1, 2.0),),
            "allowed_token_ids": (1,),
            "structured": ("regex", "a"),
        }
        changed = changed.get(name, ("a",))
    other = dataclasses.replace(base, **{name: changed})
    digests = {
        receipts.request_digest([1], receipts.options_of(sampling)) for sampling in (base, other)
    }
    assert len(digests) == 2


def test_looking_at_logprobs_is_the_same_request():
    digests = {
        receipts.request_digest(
            [1], receipts.options_of(Sampling(8, logprobs=k, prompt_logprobs=k))
        )
        for k in (None, 0, 5)
    }
    assert len(digests) == 1


def test_a_number_written_as_integer_is_the_same_request():
    options = receipts.options_of(Sampling(8, temperature=1.0, logit_bias=((5, 2.0),)))
    again = {**options, "temperature": 1, "logit_bias": [[5, 2]]}
    assert receipts.request_digest([1], options) == receipts.request_digest([1], again)


async def test_minted_where_tokens_come_out():
    engine = ToyEngine()
    minter = Minter(engine)
    outputs = await answer(engine, minter, Sampling(6, seed=42))
    bare = [
        o
        async for o in engine.generate(
            Prompt((1, 2, 3)), Sampling(6, seed=42, logprobs=0), request_id="r"
        )
    ]
    receipt = outputs[-1].receipt
    assert all(o.receipt is None for o in outputs[:-1])
    assert receipt["token_ids_sha256"] == canonical.sha256_of_ids(
        [i for o in bare for i in o.token_ids]
    )
    assert receipt["logprobs_sha256"] == canonical.sha256_of_floats(
        [p.token.logprob for o in bare for p in o.logprobs]
    )
    assert receipt["fingerprint"] == engine.fingerprint and receipt["seed"] == 42
    # The client did not ask for logprobs and sees none, token for token the same answer.
    assert all(o.logprobs is None for o in outputs)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in bare]


async def test_logprobs_that_were_asked_for_stay():
    engine = ToyEngine()
    outputs = await answer(engine, Minter(engine), Sampling(3, logprobs=2))
    assert all(o.logprobs for o in outputs)


async def test_not_wanted_and_not_logged_costs_nothing():
    engine = ToyEngine()
    assert Minter(engine).over(engine, wanted=False) is engine


async def test_leaving_early_stops_the_engine_and_mints_nothing(tmp_path):
    engine = ToyEngine()
    source = Minter(engine).over(engine, wanted=True)
    outputs = source.generate(Prompt((1,)), Sampling(100), request_id="r")
    await anext(outputs)
    await outputs.aclose()
    assert engine.running == 0 and engine.closed == 1


class OneOutput(ToyEngine):
    """Yields what it is told to."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    async def generate(self, prompt, sampling, *, request_id, priority=0, whole=False):
        yield self.output


@pytest.mark.parametrize("end", ["abort", "error"])
async def test_an_answer_that_broke_off_has_no_receipt(tmp_path, end):
    engine = OneOutput(Output("x", (1,), None, finish_reason=end))
    header = {"fingerprint": engine.fingerprint, "tree": dict(engine.fingerprint_tree)}
    log = ReceiptLog(tmp_path / "r.jsonl", header, max_bytes=1 << 30)
    assert (await answer(engine, Minter(engine, log=log), Sampling(3)))[-1].receipt is None
    assert [*Reader([tmp_path / "r.jsonl"]).entries()] == []


async def test_logprobs_that_json_lacks():
    def output(value):
        return Output(
            "x", (1,), (Position(TokenLogprob(1, value, 1, "x"), ()),), finish_reason="stop"
        )

    engine = OneOutput(output(-math.inf))
    receipt = (await answer(engine, Minter(engine), Sampling(3)))[-1].receipt
    assert receipt["logprobs_sha256"] == canonical.sha256_of_floats([-9999.0])
    engine = OneOutput(output(math.nan))
    with pytest.raises(EngineFailed):
        await answer(engine, Minter(engine), Sampling(3))


async def test_without_logprobs_the_receipt_says_so():
    engine = OneOutput(Output("x", (1,), None, finish_reason="stop"))
    receipt = (await answer(engine, Minter(engine), Sampling(3)))[-1].receipt
    assert receipt["logprobs_sha256"] is None and receipt["num_tokens"] == 1


async def test_nothing_else_of_an_output_is_lost():
    """Every field, also one that Output gains later, comes through."""
    position = Position(TokenLogprob(1, -0.5, 1, "x"), ())
    whole = Output("x", (1,), (position,), (None, position), "stop", "s", 3)
    values = [getattr(whole, f.name) for f in dataclasses.fields(Output) if f.name != "receipt"]
    defaults = [f.default for f in dataclasses.fields(Output) if f.name != "receipt"]
    assert not any(a == b for a, b in zip(values, defaults, strict=True)), "give it a value here"
    engine = OneOutput(whole)
    (seen,) = await answer(engine, Minter(engine), Sampling(3, logprobs=1), wanted=True)
    assert dataclasses.replace(seen, receipt=None) == whole and seen.receipt


async def test_a_scored_prompt_has_no_receipt():
    engine = OneOutput(Output(finish_reason="length"))
    outputs = await answer(engine, Minter(engine), Sampling(0, prompt_logprobs=0))
    assert [o.receipt for o in outputs] == [None]


def test_places_are_checked_before_a_model_is_loaded(tmp_path):
    check_places(Settings())
    check_places(Settings(receipts=str(tmp_path / "r.jsonl")))
    with pytest.raises(BadPlace, match="SAMEBITS_RECEIPTS="):
        check_places(Settings(receipts=str(tmp_path / "absent" / "r.jsonl")))
    for place in (str(tmp_path), "/dev/null", "/dev/full"):
        with pytest.raises(BadPlace):
            check_places(Settings(receipts=place))
    with pytest.raises(signing.BadKey, match="SAMEBITS_RECEIPTS_KEY_FILE="):
        check_places(Settings(receipts_key_file=str(tmp_path / "absent")))


def served(engine, headers=None, **settings):
    """(status and body of one completion through the application, body of /version)."""

    async def opened(_):
        return engine

    body = {"prompt": "Hello", "max_tokens": 4, "seed": 1}
    with serving(create_app(Settings(**settings), opened), lifespan="on") as url:
        while httpx.get(url + "/ready").status_code != 200:
            time.sleep(0.02)
        plain = httpx.post(url + "/v1/completions", json=body, headers=headers)
        streamed = httpx.post(
            url + "/v1/completions", json={**body, "stream": True}, headers=headers
        )
        return plain, streamed.text, httpx.get(url + "/version").json()


def test_through_the_application(tmp_path):
    """Header, body of the answer, last chunk of a stream, log, signature and its public key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = tmp_path / "key.pem"
    key.write_bytes(pem(Ed25519PrivateKey.generate()))
    log = tmp_path / "r.jsonl"
    settings = {"receipts": str(log), "receipts_key_file": str(key)}

    class Named(FakeEngine):
        fingerprint = fingerprint.short({"model": {"weights": "none"}})

    plain, streamed, version = served(Named(), {"X-Samebits-Receipt": "1"}, **settings)
    (receipt,) = plain.json()["samebits"]["receipts"]
    assert signing.verify(receipt, version["receipts_public_key"]) is None
    events = [json.loads(e[6:]) for e in streamed.split("\n\n") if e.startswith("data: {")]
    assert events[-1]["samebits"]["receipts"][0]["text_sha256"] == receipt["text_sha256"]
    assert [e.status for e in Reader([log], version["receipts_public_key"]).entries()] == ["", ""]
    assert "receipts" not in served(FakeEngine())[0].json()["samebits"]


def test_no_answer_without_its_receipt_where_that_is_asked_for(tmp_path, monkeypatch):
    def full(self, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReceiptLog, "_lock_and_write", full)
    log = str(tmp_path / "r.jsonl")
    plain, streamed, _ = served(FakeEngine(), receipts=log)
    assert plain.status_code == 503
    assert plain.json()["error"]["code"] == "receipts_unavailable"
    assert "receipts_unavailable" in streamed and '"finish_reason":"' not in streamed
    plain, streamed, _ = served(FakeEngine(), receipts=log, receipts_on_error="serve")
    assert plain.status_code == 200 and '"finish_reason":"length"' in streamed


def record():
    return json.loads(json.dumps(VECTORS["receipts"][0]))


def test_edits_are_noticed():
    receipts.check_record(record())
    for path, value, named in [
        (("answer", "token_ids", 0), 7, "token_ids_sha256"),
        (("answer", "logprobs", 0), -0.25, "logprobs_sha256"),
        (("answer", "text"), "no", "text_sha256"),
        (("request", "options", "seed"), 43, "request_sha256"),
        (("request", "prompt_token_ids", 0), 9, "request_sha256"),
        (("receipt", "num_tokens"), 1, "num_tokens"),
        (("receipt", "schema"), "samebits.receipt/9", "samebits.receipt/9"),
        (("receipt", "text_sha256"), "zz", "text_sha256"),
        (("answer", "logprobs"), {"a": 1}, "malformed"),
        (("request", "options"), None, "malformed"),
    ]:
        edited = record()
        at = edited
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        with pytest.raises(receipts.BadReceipt, match=named):
            receipts.check_record(edited)
    for path, value, named in [
        (("receipt", "seed"), 5, "seed does not match"),
        (("receipt", "choice"), 1, "choice does not match"),
        (("receipt", "choice"), "0", "choice should be int"),
        (("receipt", "choice"), True, "choice should be int"),
        (("receipt", "model"), ["a"], "model should be str"),
        (("receipt", "fingerprint"), {}, "fingerprint should be str"),
        (("receipt", "fingerprint"), "sb1-0123456789abcdee", "is not the head of"),
        (("receipt", "finish_reason"), "length", "finish_reason does not match"),
        (("answer", "finish_reason"), "length", "finish_reason does not match"),
        (("receipt", "text_sha256"), "A" * 64, "text_sha256"),
        (("extra",), 1, "'extra' is no member"),
    ]:
        edited = record()
        at = edited
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        with pytest.raises(receipts.BadReceipt, match=named):
            receipts.check_record(edited)
    for key in receipts.REQUIRED:
        cut = record()
        del cut["receipt"][key]
        with pytest.raises(receipts.BadReceipt, match=key):
            receipts.check_record(cut)


def test_vectors_of_a_line():
    for vector in VECTORS["lines"]:
        assert receipts.line_digest(vector) == vector["line_sha256"]
        receipts.check_record(vector)


@pytest.mark.parametrize("kind", ["full", "digests", "signed", "header"])
async def test_a_flipped_bit_anywhere_is_noticed(tmp_path, kind):
    """Every bit of a line of the log, one after the other. What still reads as the same JSON (a
    letter of an escape or of an exponent, the last digit of a long number) is the same line.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    engine = ToyEngine()
    header = {"fingerprint": engine.fingerprint, "tree": dict(engine.fingerprint_tree)}
    minter = Minter(
        engine,
        log=ReceiptLog(tmp_path / "log.jsonl", header, max_bytes=1 << 30),
        signer=signing.Signer(Ed25519PrivateKey.generate()) if kind == "signed" else None,
        full=kind != "digests",
    )
    sampling = Sampling(3, seed=-5, stop=("é\n",), logit_bias=((4, 0.5),), temperature=1e-05)
    source = minter.over(engine, False)
    async for _ in source.generate(Prompt((1, 2), "ü\u2028 b"), sampling, request_id="r"):
        pass
    head, line = (tmp_path / "log.jsonl").read_bytes().split(b"\n")[:2]
    whole = head if kind == "header" else line
    flips = []
    for at in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            if data[at] != ord("\n"):
                flips.append(bytes(data))
    path = tmp_path / "flips.jsonl"
    path.write_bytes(b"\n".join(flips) + b"\n")
    entries = {e.line: e for e in Reader([path]).entries()}
    unnoticed = []
    for number, data in enumerate(flips, 1):
        entry = entries.get(number)
        if entry is None or not entry.status:
            if json.loads(data) != json.loads(whole):
                unnoticed.append(data)
        else:
            assert entry.fault
    assert unnoticed == []
    assert len(flips) > 3000


def test_one_bit_of_a_logprob_counts():
    edited = record()
    edited["answer"]["logprobs"][-1] = math.nextafter(edited["answer"]["logprobs"][-1], 0)
    with pytest.raises(receipts.BadReceipt, match="logprobs_sha256"):
        receipts.check_record(edited)


def pem(key):
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def test_signatures(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    def key_file(name):
        path = tmp_path / name
        path.write_bytes(pem(Ed25519PrivateKey.generate()))
        return path

    signer, other = (signing.Signer.from_file(key_file(n)) for n in "ab")
    signed = signer.sign(record()["receipt"])
    assert signing.verify(signed) is None
    assert signing.verify(signed, signer.public_key) is None
    assert "another key" in signing.verify(signed, other.public_key)
    assert "edited" in signing.verify({**signed, "created": 1})
    assert signing.verify(record()["receipt"]) == "not signed"
    value = signed["signature"]["value"]
    last = chr(ord(value[-3]) + 1)  # two spellings of one signature: its last two bits are unused
    for changed in (
        {"value": "!"},
        {"value": value[:-3] + last + "=="},
        {"value": 5},
        {"public_key": None},
        {"public_key": signed["signature"]["public_key"].upper()},
        {"algorithm": "none"},
        {"also": 1},
    ):
        broken = {**signed, "signature": {**signed["signature"], **changed}}
        assert "malformed" in signing.verify(broken), changed
    assert "malformed" in signing.verify({**signed, "signature": None})
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert "malformed" in signing.verify({**signed, "created": deep})
    (tmp_path / "bad").write_text("no key")
    for path in (tmp_path / "bad", tmp_path / "absent"):
        with pytest.raises(signing.BadKey):
            signing.Signer.from_file(path)
