"""What a container must do, tried on the mounted root of the image: `proof.py ROOT WORK`.

The image runs as process 1 of its own, as uid 1000, on a read-only root, with no network but its
own loopback, a tmpfs on /tmp and one volume. Each check prints a line; the first that fails ends
it, exit code 1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UID, GID, PORT = 1000, 0, 8000
START_S = 400
# Mounts of a container: all that is written is the volume and /tmp.
INSIDE = r"""
set -e
root=$1 volume=$2; shift 2
mount --bind "$root" "$root"
mount --bind "$volume" "$root/var/lib/samebits"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"
mount -o remount,bind,ro "$root"
ip link set lo up
exec chroot --userspec=1000:0 "$root" /usr/bin/env -i "$@"
"""
BODY = {"prompt": "The future of AI is", "max_tokens": 24, "temperature": 0.7, "logprobs": 1}
CLIENT = r"""
import json, sys
from openai import OpenAI
options = json.loads(sys.argv[1])
answer = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="EMPTY").completions.create(
    model="smollm2-135m-instruct", **options)
if options.get("stream"):
    text, reason = "", None
    for chunk in answer:
        print("first" if not text else "next", file=sys.stderr, flush=True)
        text, reason = text + chunk.choices[0].text, chunk.choices[0].finish_reason or reason
    print(json.dumps([text, reason]))
else:
    choice = answer.choices[0]
    logprobs = choice.logprobs and choice.logprobs.token_logprobs
    print(json.dumps([choice.text, logprobs, answer.system_fingerprint]))
"""


class Container:
    """One run of the image; the process is `unshare`, the server is process 1 below it."""

    def __init__(self, root: Path, work: Path, config: dict[str, Any], *args: str, **env: str):
        self.root, self.log = root, work / "server.log"
        volume = work / "volume"
        threads = os.environ.get("SAMEBITS_NUM_THREADS")
        env = ({"SAMEBITS_NUM_THREADS": threads} if threads else {}) | env
        variables = [*config["Env"], *(f"{k}={v}" for k, v in env.items())]
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc"]
        inside = ["bash", "-c", INSIDE, "inside", str(root), str(volume), *variables]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*spaces, *inside, *config["Entrypoint"], *args], stdout=out, stderr=out
            )
        self.first = 0  # process 1, by its id here
        while self.process.poll() is None and not self.first:
            time.sleep(0.01)
            self.first = int(next(iter(_children(self.process.pid)), 0))

    def enter(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this machine in the container's network."""
        return subprocess.run(
            ["nsenter", "-t", str(self.first), "--net", *command], capture_output=True, text=True
        )

    def status(self, path: str) -> int:
        """The status of GET path; 0 while nobody answers."""
        url = f"http://127.0.0.1:{PORT}{path}"
        done = self.enter("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url)
        return int(done.stdout or 0)

    def ask(self, **options: Any) -> Any:
        """One completion by the OpenAI client."""
        done = self.enter(sys.executable, "-c", CLIENT, json.dumps(BODY | options))
        if done.returncode != 0:
            raise SystemExit(f"the client failed:\n{done.stderr[-2000:]}\n{self.tail()}")
        return json.loads(done.stdout)

    def ready(self) -> float:
        """Wait for /ready; the seconds it took."""
        began = time.monotonic()
        while self.status("/ready") != 200:
            if self.process.poll() is not None or time.monotonic() - began > START_S:
                raise SystemExit(f"never ready:\n{self.tail()}")
            time.sleep(0.5)
        return time.monotonic() - began

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])


def _children(pid: int) -> list[str]:
    """Process ids below `pid`; none once it has ended."""
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def image_config() -> dict[str, Any]:
    """Env, Entrypoint, User and Healthcheck as the image states them."""
    shown = subprocess.run(
        ["buildah", "inspect", "--type", "image", "localhost/samebits:cpu"],
        capture_output=True,
        text=True,
        check=True,
    )
    config: dict[str, Any] = json.loads(shown.stdout)["Docker"]["config"]
    return config


def say(words: str, holds: bool = True) -> None:
    sys.stdout.write(("ok    " if holds else "FAIL  ") + words + "\n")
    sys.stdout.flush()
    if not holds:
        raise SystemExit(1)


def runs(root: Path, work: Path, config: dict[str, Any]) -> None:
    """Start, answer, drain, stop; then again on the used volume, to the same bits."""
    shutil.rmtree(work / "volume", ignore_errors=True)
    (work / "volume").mkdir()
    os.chown(work / "volume", UID, GID)
    box = Container(root, work, config)
    say(f"first start, demo model made in the empty volume: ready after {box.ready():.0f} s")
    facts = Path(f"/proc/{box.first}/status").read_text()
    uid = next(line.split()[1] for line in facts.splitlines() if line.startswith("Uid:"))
    caps = next(line.split()[1] for line in facts.splitlines() if line.startswith("CapEff:"))
    say(f"process 1 is the server itself, uid {uid}, effective capabilities {caps}",
        uid == str(UID) and int(caps, 16) == 0 and "samebits" in _command(box.first))  # fmt: skip
    written = subprocess.run(
        ["nsenter", "-t", str(box.first), "--mount", "touch", f"{root}/opt/x"], capture_output=True
    )
    say("the root file system is read-only", written.returncode != 0)
    log = box.log.read_text()
    say("no compiler in the image; kernels: " + _word(log, "prebuilt"), "prebuilt" in log)
    check = config["Healthcheck"]["Test"]
    said = subprocess.run(
        ["nsenter", "-t", str(box.first), "--net", "chroot", f"--userspec={UID}:{GID}", str(root),
         "/usr/bin/env", "-i", *config["Env"], "/bin/sh", "-c", check[1]]
    )  # fmt: skip
    say("HEALTHCHECK, as the image states it, exits 0", said.returncode == 0)
    seeded, greedy = box.ask(seed=42), box.ask(temperature=0)
    say(f"OpenAI client, seed 42: {seeded[0][:40]!r}… {seeded[2]}", box.ask(seed=42) == seeded)
    drains(box)
    again = Container(root, work, config, "--max-num-seqs", "3", "--max-num-batched-tokens", "16")
    say(f"second start, other scheduling, used volume: ready after {again.ready():.0f} s")
    same = [again.ask(seed=42), again.ask(temperature=0)] == [seeded, greedy]
    say("the same bits and the same fingerprint after the restart", same)
    os.kill(again.first, 15)
    say("SIGTERM with nothing open: exit code 0", again.process.wait(30) == 0)


def drains(box: Container) -> None:
    """SIGTERM while a stream is open: /ready 503 at once, the stream ends whole, exit code 0."""
    options = {"seed": 7, "max_tokens": 160, "extra_body": {"ignore_eos": True}, "logprobs": None}
    wanted = box.ask(**options)[0]
    got: list[Any] = []
    stream = threading.Thread(target=lambda: got.append(box.ask(**options, stream=True)))
    stream.start()
    while not _in_engine(box):
        time.sleep(0.05)
    os.kill(box.first, 15)
    told = time.monotonic()
    codes = set()
    while time.monotonic() < told + 0.6:
        codes.add(box.status("/ready"))
    stream.join()
    ended = time.monotonic()
    say(f"SIGTERM with an open stream of 160 tokens: /ready {sorted(codes)}", 503 in codes)
    say(f"the stream went on for {ended - told:.1f} s and ended whole, equal to the plain answer",
        got == [[wanted, "length"]])  # fmt: skip
    code = box.process.wait(40)
    say(f"exit code {code}, {time.monotonic() - ended:.1f} s after the last answer", code == 0)


def _in_engine(box: Container) -> bool:
    shown = box.enter("curl", "-s", f"http://127.0.0.1:{PORT}/metrics").stdout
    return any(line == "samebits_choices_in_engine 1.0" for line in shown.splitlines())


def refuses(root: Path, work: Path, config: dict[str, Any]) -> None:
    """Starts that can't go on: one line, exit code 2."""
    for args, env, word in _faults():
        box = Container(root, work, config, *args, **env)
        code = box.process.wait(120)
        log = box.log.read_text()
        say(f"{' '.join(args) or env}: exit {code}: {_word(log, word)}",
            code == 2 and word in log and "Traceback" not in log)  # fmt: skip


def _faults() -> Iterator[tuple[list[str], dict[str, str], str]]:
    yield [], {"SAMEBITS_MAX_NUM_SEQ": "3"}, "did you mean SAMEBITS_MAX_NUM_SEQS"
    yield ["--model", "/models/none"], {}, "no such folder"
    yield ["--model", "/root/model"], {}, "can't be read"
    yield [], {"SAMEBITS_CACHE_DIR": "/opt/cache"}, "SAMEBITS_CACHE_DIR"
    yield ["--device", "npu"], {}, "vllm-ascend is not installed"
    yield ["--device", "cuda"], {}, "no CUDA build of vllm is installed"


def _word(log: str, word: str) -> str:
    return next((line.strip() for line in log.splitlines() if word in line), "?")


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


if __name__ == "__main__":
    place, folder, stated = Path(sys.argv[1]), Path(sys.argv[2]), image_config()
    runs(place, folder, stated)
    refuses(place, folder, stated)
    sys.stdout.write("all of it holds\n")
