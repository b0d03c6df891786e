"""What identifies the numerics: a tree of everything that decides bits, and a short hash of it.

    files = model_part(folder, cache_path=…)                      # hashes; run it beside loading
    tree = build_tree(files, engine={…}, ops=health.report, device=machine.device_facts("cpu"),
    forced=forced.env, …) short(tree)                                                   # "sb1-"
    and 16 hexadecimal digits

Plain dictionaries in, plain dictionaries out; nothing here knows vLLM, torch or ops.
docs/fingerprint.md says what is in and what is out, and why.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server import machine, weights
from server.canonical import sha256_of, sha256_of_text

SCHEMA = "samebits.fingerprint/1"
PREFIX = "sb1-"
# Engine options that change no bit of any answer. Their presence in the tree would be a fault of
# ours.
NOT_BITS = frozenset(
    "max_num_seqs max_num_batched_tokens block_size num_gpu_blocks_override kv_cache_memory_bytes "
    "num_threads gpu_memory_utilization enable_prefix_caching host port root_path max_queue "
    "max_logprobs".split()
)
# Keys of config.json that say where a model came from, not what it computes.
CONFIG_NOISE = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
PLAIN_ROPE = (None, "default", "linear", "llama3", "mrope", "proportional")


def model_part(
    folder: Path,
    *,
    tokenizer_folder: Path | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    load_format: str = "auto",
    cache_path: Path | None = None,
    progress: weights.Progress | None = None,
) -> dict[str, Any]:
    """The model's share of the tree: digests of weights, config, tokenizer and chat template.

    `folder` is a Hugging Face folder or a single weights file. `chat_template` is the text in
    force where it is not the tokenizer's own. Raises `OSError`, and `RuntimeError` when a file
    changes meanwhile or the tokenizer has none.
    """
    single = folder.is_file()
    home = folder.parent if single else folder
    words = tokenizer_folder or home
    files = [folder] if single else weights.weight_files(home, load_format)
    spelling = weights.tokenizer_files(words)
    if not spelling and not single:  # a GGUF file holds its own
        raise RuntimeError(f"{words}: no file of a tokenizer, so nothing to tell it by")
    part: dict[str, Any] = {
        "weights": weights.digests(files, cache_path, progress),
        "config": config_digest(home / "config.json"),
        "tokenizer": {p.name: _tokenizer_digest(p) for p in spelling},
        "end_tokens": end_tokens(home),
        "chat_template": sha256_of_text(chat_template or _own_template(words)),
    }
    if trust_remote_code:
        part["code"] = weights.digests(weights.code_files(home))
    return part


def start_model_part(folder: Path, **options: Any) -> Future[dict[str, Any]]:
    """`model_part` in a thread beside the loading of the model; `.result()` waits."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="weights")
    future = pool.submit(model_part, folder, **options)
    pool.shutdown(wait=False)
    return future


def build_tree(
    model: Mapping[str, Any],
    *,
    engine: Mapping[str, Any],
    ops: Mapping[str, Any],
    device: Mapping[str, Any],
    forced: Mapping[str, Any],
    determinism: str = "on",
    sampler: str | None = None,
    versions: Mapping[str, str] | None = None,
    ops_code: str | None = None,
) -> dict[str, Any]:
    """The whole tree.

    `engine`: dtype, quantization, kv_cache_dtype, attention_backend, tensor_parallel_size,
    enforce_eager, load_format and what else decides bits, under vLLM's names; None values are left
    out. `ops`: one rank's answer to check_ops ({table, hash, …}; ranks agree or the start stops).
    `forced`: variables and options that the promise set. Raises `ValueError` when `engine` holds
    an option that decides nothing.
    """
    stray = sorted(NOT_BITS & set(engine))
    if stray:
        raise ValueError(f"{', '.join(stray)}: changes no bit and must stay out of the fingerprint")
    return {
        "schema": SCHEMA,
        "determinism": determinism,
        "model": dict(model),
        "engine": {key: _scalar(value) for key, value in engine.items() if value is not None},
        "ops": {
            "table": list(ops.get("table", [])),
            "hash": ops.get("hash", ""),
            "code": ops_code if ops_code is not None else machine.ops_code_digest(),
        },
        "sampler": sampler if sampler is not None else ops.get("sampler"),
        "device": dict(device),
        "versions": dict(machine.versions() if versions is None else versions),
        "forced": {key: _scalar(value) for key, value in forced.items()},
    }


def digest(tree: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical tree, 64 hexadecimal digits: the long form of the fingerprint."""
    return sha256_of(tree)


def short(tree: Mapping[str, Any]) -> str:
    """The fingerprint as it goes out: "sb1-" and the first 16 hexadecimal digits of the digest."""
    return PREFIX + digest(tree)[:16]


def context_matters(config: Mapping[str, Any]) -> bool:
    """Whether `max_model_len` decides bits: some rotary scalings choose their factors by it."""
    text = config.get("text_config", config)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kinds = {part.get("rope_type", part.get("type")) for part in _rope_parts(rope)}
    return any(kind not in PLAIN_ROPE for kind in kinds)


def config_digest(path: Path) -> str | None:
    """SHA-256 of config.json's canonical form: white space, key order and origin don't count.
    None: no file.
    """
    if not path.is_file():
        return None
    config = json.loads(path.read_bytes())
    return sha256_of({key: value for key, value in config.items() if key not in CONFIG_NOISE})


def end_tokens(folder: Path) -> list[int]:
    """The ids that generation_config.json ends an answer with, whatever else of it is left out."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []  # config.json's, which are in its digest
    found = json.loads(path.read_bytes()).get("eos_token_id")
    return sorted(found) if isinstance(found, list) else [found] if found is not None else []


@dataclass(frozen=True)
class Difference:
    """One leaf where two trees differ. `words` is a sentence; a side that lacks the leaf holds
    None.
    """

    path: str
    left: Any
    right: Any
    words: str


WORDS = {
    "model.weights": "the weights differ ({leaf})",
    "model.config": "the model's config.json differs",
    "model.tokenizer": "the tokenizer differs ({leaf})",
    "model.end_tokens": "the tokens that end an answer differ",
    "model.chat_template": "the chat template differs",
    "model.code": "the model's own code differs ({leaf})",
    "engine": "the engine option {leaf} differs",
    "ops.table": "the op {leaf} differs",
    "ops.code": "the source code of the ops differs",
    "ops.hash": "the table of ops differs",
    "sampler": "the sampler's version differs",
    "device": "the device differs ({leaf})",
    "versions": "the version of {leaf} differs",
    "forced": "the forced setting {leaf} differs",
    "determinism": "determinism is on in one and off in the other",
    "schema": "the fingerprints are of different schemas",
}


def diff(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    """Every leaf that differs, in the tree's order, each in words. Empty when the trees are
    equal.
    """
    a, b = dict(_leaves(left)), dict(_leaves(right))
    found = [
        Difference(path, a.get(path), b.get(path), _words(path, a.get(path), b.get(path)))
        for path in sorted({*a, *b})
        if a.get(path) != b.get(path)
    ]
    # The table's hash repeats what its rows say; alone it still names a difference.
    named = [d for d in found if d.path != "ops.hash"]
    return named or found


def _words(path: str, left: Any, right: Any) -> str:
    prefix = max((p for p in WORDS if path == p or path.startswith(p + ".")), key=len, default="")
    leaf = path[len(prefix) :].lstrip(".")
    sentence = WORDS[prefix].format(leaf=leaf or prefix) if prefix else f"{path} differs"
    return f"{sentence}: {_show(left)} / {_show(right)}"


def _show(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    hexadecimal = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] + "…" if hexadecimal else text


def _leaves(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """(dotted path, leaf) pairs. Rows of the ops table go by their op's name, so that order says
    nothing.
    """
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and all(isinstance(i, Mapping) for i in value):
        for item in value:
            rest = {key: part for key, part in item.items() if key != "op"}
            yield f"{path}.{item.get('op', '?')}", rest
    else:
        yield path, value


def _rope_parts(rope: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    return nested or [rope]


def _tokenizer_digest(path: Path) -> str:
    """Bytes, but tokenizer_config.json without the chat template and the origin, which stand
    elsewhere or nowhere.
    """
    if path.name != "tokenizer_config.json":
        return weights.digest(path)
    config = json.loads(path.read_bytes())
    return sha256_of(
        {k: v for k, v in config.items() if k not in ("chat_template", "name_or_path")}
    )


def _own_template(folder: Path) -> str:
    """The chat template that comes with the tokenizer, in whichever file; "" if there is none."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_bytes()).get("chat_template")
            if found:
                return found if isinstance(found, str) else json.dumps(found, sort_keys=True)
    return ""


def _scalar(value: Any) -> Any:
    """JSON scalars and containers as they are, anything else (an enum, a dtype) by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _scalar(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scalar(item) for item in value]
    return str(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`samebits fingerprint`."""
    from server import fingerprint_command

    fingerprint_command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """`samebits fingerprint`; returns the exit code."""
    from server import fingerprint_command

    return fingerprint_command.run(args)
