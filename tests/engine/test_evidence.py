"""Evidence on the real engine: receipts replayed after a restart, under load, with other scheduler
settings; and every change of the numerics caught and named.

The model is the demo model cut down to its first two layers: real weights, quick starts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from config.settings import DEMO_MODEL, Settings
from server.receiptfile import Reader
from server.vllm_start import resolve_model
from tests.engine.conftest import SAMEBITS, clean_env, serving

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
PATIENT = {"SAMEBITS_STEP_TIMEOUT_S": "120"}  # a busy test machine is no stuck engine
OTHER_SETTINGS = {
    "SAMEBITS_MAX_NUM_SEQS": "3",
    "SAMEBITS_MAX_NUM_BATCHED_TOKENS": "16",
    "SAMEBITS_BLOCK_SIZE": "32",
    "SAMEBITS_ENABLE_PREFIX_CACHING": "false",
    "SAMEBITS_NUM_THREADS": "1",
    "SAMEBITS_KV_CACHE_MEMORY_BYTES": str(64 << 20),
}
LONG = "The quick brown fox jumps over the lazy dog. " * 9
REQUESTS = [
    {"prompt": "The future of AI is", "temperature": 0.7, "seed": 42},
    {"prompt": "The capital of France is", "temperature": 0},
    {"prompt": LONG, "temperature": 1.0, "seed": -7, "n": 3},
    {"prompt": ["Once", "Once upon a time"], "seed": 0, "top_p": 0.9, "logprobs": 3},
    {"prompt": "x =", "seed": 5, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.5},
    {"prompt": "a b c", "seed": 9, "logit_bias": {"11": 2.5}, "stop": [" d"], "ignore_eos": True},
    {"prompt": "Unseeded"},
    {"prompt": "echo", "seed": 3, "echo": True, "logprobs": 0},
]
CHOICES = 3 + 2 + 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Two layers of the demo model."""
    from safetensors.torch import load_file, save_file

    source = Path(resolve_model(Settings(model=DEMO_MODEL)))
    folder = tmp_path_factory.mktemp("two-layers")
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    tensors = load_file(source / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if ".layers." not in k or int(k.split(".")[2]) < 2}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def ask_all(url, **changes):
    """All of REQUESTS at once; their bodies in order."""
    with httpx.Client(timeout=300) as http, ThreadPoolExecutor(8) as pool:
        bodies = [{"max_tokens": 12, "samebits_receipt": True, **r, **changes} for r in REQUESTS]
        found = list(pool.map(lambda b: http.post(f"{url}/v1/completions", json=b), bodies))
    assert [r.status_code for r in found] == [200] * len(found), [r.text for r in found]
    return [r.json() for r in found]


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """A log of receipts, and the bodies that were answered, from one start that is over."""
    folder = tmp_path_factory.mktemp("receipts")
    log = folder / "receipts.jsonl"
    env = {**PATIENT, "SAMEBITS_RECEIPTS": str(log)}
    with serving(
        folder / "server.log", "--model", str(model), "--served-model-name", "two", **env
    ) as s:
        bodies = ask_all(s.url)
        streamed = httpx.post(
            f"{s.url}/v1/completions",
            json={**REQUESTS[0], "max_tokens": 12, "stream": True, "samebits_receipt": True},
            timeout=300,
        ).text
    return log, bodies, streamed


def replay(log, url, *flags):
    report = log.with_suffix(".replay.json")
    command = [SAMEBITS, "replay", str(log), "--base-url", url, "--restart", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_env(), timeout=500)
    return done.returncode, json.loads(report.read_text()) if report.exists() else done.stderr


def test_one_receipt_per_choice_in_answer_stream_and_log(made):
    log, bodies, streamed = made
    receipts = [r for body in bodies for r in body["samebits"]["receipts"]]
    assert len(receipts) == CHOICES
    entries = list(Reader([log]).entries())
    assert [e.status for e in entries] == [""] * (CHOICES + 1)
    logged = {e.record["receipt"]["request_id"]: e.record["receipt"] for e in entries}
    for receipt in receipts:
        assert logged[receipt["request_id"]] == receipt
    events = [json.loads(x[6:]) for x in streamed.split("\n\n") if x.startswith("data: {")]
    (last,) = events[-1]["samebits"]["receipts"]
    assert streamed.rstrip().endswith("data: [DONE]")
    for key in ("request_sha256", "token_ids_sha256", "logprobs_sha256", "text_sha256"):
        assert last[key] == receipts[0][key]  # streamed and plain: the same request, the same bits


def test_replayed_after_a_restart_with_other_settings_under_load(made, model, tmp_path):
    log, _, _ = made
    with serving(
        tmp_path / "log",
        "--model",
        str(model),
        "--served-model-name",
        "two",
        **PATIENT,
        **OTHER_SETTINGS,
    ) as s:
        stop = threading.Event()

        def load():
            while not stop.is_set():
                ask_all(s.url, seed=1234)

        neighbour = threading.Thread(target=load)
        neighbour.start()
        try:
            code, report = replay(log, s.url)
        finally:
            stop.set()
            neighbour.join()
        fingerprints = subprocess.run(
            [SAMEBITS, "fingerprint", "--diff", s.url, str(log)],
            capture_output=True, text=True, env=clean_env(),
        )  # fmt: skip
    assert code == 0, report
    assert report["counts"] == {"equal": CHOICES + 1}
    assert report["compared"]["token_ids"] == report["compared"]["logprobs"] == CHOICES + 1
    assert fingerprints.returncode == 0, fingerprints.stdout


def flipped(model, folder):
    """One bit of one weight: the highest of the mantissa of the first element of the last norm."""
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    at = json.loads(data[8 : 8 + size])["model.norm.weight"]["data_offsets"][0]
    data[8 + size + at] ^= 0x40
    path.write_bytes(data)
    return folder


def other_ops(folder):
    """The project with another version of an op: a copy that comes first on the path."""
    for name in ("config", "server", "ops"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "ops" / "sampling.py").open("a") as file:
        file.write("\n# another version\n")
    return folder


@pytest.mark.parametrize(
    ("what", "named", "bits"),
    [
        ("weight bit", "the weights differ (model.safetensors)", True),
        ("dtype", "the engine option dtype differs: bfloat16 / float32", True),
        ("stock ops", "determinism is on in one and off in the other", None),
        ("op version", "the source code of the ops differs", False),
    ],
)
def test_every_change_of_the_numerics_is_caught_and_named(made, model, tmp_path, what, named, bits):
    """`bits`: whether the change must show in the answers too; None: it may."""
    args, env = ["--served-model-name", "two"], dict(PATIENT)
    if what == "weight bit":
        model = flipped(model, tmp_path / "flipped")
    elif what == "dtype":
        args += ["--dtype", "float32"]
    elif what == "stock ops":
        args += ["--determinism", "off", "--enforce-eager", "true"]
    else:
        env["PYTHONPATH"] = str(other_ops(tmp_path / "copy"))
    with serving(tmp_path / "log", "--model", str(model), *args, **env) as s:
        code, report = replay(made[0], s.url)
    assert code == 1
    assert (
        report["counts"].get("other_fingerprint", 0) + report["counts"].get("refused", 0)
        == CHOICES + 1
    )
    assert report["counts"]["other_fingerprint"]
    assert any(named in reason for reason in report["named_differences"]), report[
        "named_differences"
    ]
    if bits is not None:
        differing = sum(report["first_differences"].values())
        assert differing == (CHOICES + 1 if bits else 0)


def test_batch_gives_the_servers_bits(made, model, tmp_path):
    _, bodies, _ = made
    lines = []
    for number, request in enumerate(REQUESTS):
        if "seed" in request or request.get("temperature") == 0:
            body = {"max_tokens": 12, "samebits_receipt": True, **request}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            lines.append({**line, "body": body})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    command = [SAMEBITS, "batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    command += ["--model", str(model), "--served-model-name", "two"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=clean_env(**PATIENT, **OTHER_SETTINGS),
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = {x["custom_id"]: x for x in map(json.loads, (tmp_path / "out.jsonl").open())}
    assert len(found) == len(lines)
    for line in lines:
        got, served = found[line["custom_id"]]["response"]["body"], bodies[int(line["custom_id"])]
        assert got["choices"] == served["choices"]
        for a, b in zip(got["samebits"]["receipts"], served["samebits"]["receipts"], strict=True):
            varying = ("request_id", "created")
            assert {k: v for k, v in a.items() if k not in varying} == {
                k: v for k, v in b.items() if k not in varying
            }


def code_of(document, title):
    """The Python block under a heading of a document."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    return text.split(f"## {title}", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]


def run_python(code, cwd, **env):
    """Run as a file: vLLM's processes read it again."""
    (cwd / "snippet.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "snippet.py"],
        capture_output=True, text=True, cwd=cwd, env=clean_env(**env), timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_offline_snippet_gives_the_servers_text(made, model, tmp_path):
    """The documented lines, as they stand, but for the model's place; against the served
    answers.
    """
    code = code_of("offline.md", "In Python")
    assert len(code.strip().splitlines()) <= 10
    code = code.replace('"MODEL"', repr(str(model)))
    assert str(model) in code
    code += (
        "    import json; print('IDS', json.dumps([[*o.outputs[0].token_ids] for o in outputs]))"
    )
    ids = json.loads(run_python(code, tmp_path).split("IDS ", 1)[1].splitlines()[0])
    with serving(tmp_path / "log", "--model", str(model), **PATIENT) as s:
        for prompt, got in zip(["Hello, my name is", "The future of AI is"], ids, strict=True):
            body = {
                "prompt": prompt,
                "max_tokens": 32,
                "temperature": 0.8,
                "top_p": 0.95,
                "seed": 42,
            }
            answer = httpx.post(
                f"{s.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=300
            )
            assert answer.json()["choices"][0]["token_ids"] == got


def test_the_verifier_in_the_documentation(made, tmp_path):
    log, _, _ = made
    code = code_of("receipts.md", "The form, for those who verify without this code")
    (tmp_path / "verify.py").write_text(code)
    python = sys.executable
    out = subprocess.run([python, tmp_path / "verify.py", log], capture_output=True, text=True)
    assert out.stdout.split().count("good") == CHOICES + 1 and "BAD" not in out.stdout
    edited = log.read_text().replace('"seed":42', '"seed":43')
    (tmp_path / "edited.jsonl").write_text(edited)
    out = subprocess.run(
        [python, tmp_path / "verify.py", tmp_path / "edited.jsonl"], capture_output=True, text=True
    )
    assert out.stdout.split().count("BAD") == 2
    assert os.path.getsize(log) > 0
