"""The two extra environments: found, or every test here skips and says how to make them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVS = Path(
    os.environ.get("ASCEND_TEST_ENVS")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samebits" / "ascend"
)
START_S = 900  # a crowd is asked at the start, and a MoE in an interpreter took 4 minutes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ascend)


def environment(name: str) -> Path:
    python = ENVS / name / "bin" / "python"
    if not (ENVS / name / "ready").exists():
        pytest.skip(f"no environment {name}; make it with tests/ascend/make_env.sh")
    return python


@pytest.fixture(scope="session")
def npu() -> Path:
    """The interpreter that has torch_npu and the stand-in CANN."""
    return environment("npu")


@pytest.fixture(scope="session")
def tri() -> Path:
    """The interpreter that has triton-ascend and the compiler to HIVM."""
    return environment("tri")


def variables(*, library: bool = True, triton: bool = True, **more: str) -> dict[str, str]:
    """The process environment of a machine with a stand-in NPU, with and without its libraries."""
    cann = ENVS / "npu" / "cann"
    paths = [cann, HERE / "standin"]
    paths += [HERE / "standin_ascendc"] if library else []
    paths += [cann / "triton"] if triton else []
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "LANG")}
    return {
        **kept,
        "LD_LIBRARY_PATH": str(cann),
        "ASCEND_TOOLKIT_HOME": str(cann),
        "PYTHONPATH": ":".join(map(str, paths)),
        "TRITON_INTERPRET": "1",
        "TASK_QUEUE_ENABLE": "0",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


@pytest.fixture(scope="session")
def models(npu: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense Qwen3 and a Qwen3-MoE, small, with weights of realistic size."""
    folder = tmp_path_factory.mktemp("models")
    code = (
        "import sys; from pathlib import Path; from tests.ascend import models\n"
        "models.make(Path(sys.argv[1]) / 'dense'); models.make(Path(sys.argv[1]) / 'moe', moe=True)"
    )
    env = {**variables(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    env["PYTHONPATH"] += f":{ROOT}"
    subprocess.run([npu, "-c", code, folder], env=env, check=True, capture_output=True)
    return {"dense": folder / "dense", "moe": folder / "moe"}


@dataclass
class Server:
    """A running `samebits serve`, or what is left of one."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def text(self) -> str:
        return self.log.read_text()

    def wait(self) -> bool:
        """Until it is ready (True) or has ended (False)."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return True
            except httpx.HTTPError:
                pass
            time.sleep(1)
        raise AssertionError(f"neither ready nor ended:\n{self.text()[-3000:]}")


@contextmanager
def serving(
    python: Path, model: Path, log: Path, env: dict[str, str], **more: Any
) -> Iterator[Server]:
    """`samebits serve` on the stand-in NPU; ended on the way out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options: dict[str, Any] = {
        "model": model,
        "served-model-name": "tiny",
        "port": port,
        "device": "npu",
        "dtype": "float16",
        "max-model-len": 256,
        "max-num-batched-tokens": 256,
        "max-num-seqs": 16,
        "num-gpu-blocks-override": 64,
        "gpu-memory-utilization": 0.5,
        "step-timeout-s": 250,  # kernels in the interpreter are slow
        **more,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(python), "-m", "server", "serve", *words],
            env=env,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield Server(f"http://127.0.0.1:{port}", process, log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
