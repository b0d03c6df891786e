"""From settings to a running AsyncLLM: model folder, engine arguments, processes, fingerprint.

The only modules of the server that import vLLM are those whose names begin with `vllm_`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import determinism
from config.determinism import GRAMMAR_BACKEND, Forced
from config.device import package_version
from config.settings import DEMO_MODEL, Settings, cache_dir
from server import demo_model, fingerprint, last_words, machine, weights

_log = logging.getLogger("samebits")
CPU_KV_CACHE_BYTES = 1 << 30
SHARED_BYTES = 256 << 20  # Docker's default of 64 MiB is too little for vLLM's queues between ranks
LEAST_BYTES = 1 << 30  # torch and vLLM alone; with less the kernel kills the process half-way

LEAST_NVIDIA_DRIVER = 580  # the first series of CUDA 13, which torch 2.11.0 is built for


class StartFault(RuntimeError):
    """The start can't go on. One line: the cause and the remedy. `exit_code` is documented."""

    exit_code = 2


@dataclass(frozen=True)
class Start:
    """All that is decided before the engine exists."""

    settings: Settings
    device: str
    device_reason: str
    forced: Forced
    model: str  # folder, or id on a hub
    name: str


def resolve_model(settings: Settings) -> str:
    """The folder or id to load. Raises `StartFault` on a folder that can't be served."""
    if settings.model == DEMO_MODEL and not Path(DEMO_MODEL).exists():
        try:
            return str(demo_model.ensure(_log.info))
        except demo_model.DemoModelMissing as fault:
            raise StartFault(str(fault)) from None
    path = Path(settings.model).expanduser()
    try:
        if path.exists():
            check_folder(path)
            return str(path)
    except PermissionError as fault:
        raise StartFault(
            f"model {path}: {fault.filename or path} can't be read by user {os.getuid()}; "
            "correct its owner or mode"
        ) from None
    if settings.model.startswith(("/", ".", "~")) or settings.model.count("/") > 1:
        raise StartFault(f"model {settings.model}: no such folder; check the path")
    return settings.model


def check_gpu(*, nodes: str = "/dev", module: Path | None = None) -> None:
    """A start on `cuda` needs vLLM's CUDA build, a GPU, and its driver: without them vLLM would
    quietly serve on the CPU, or fail half-way. Raises `StartFault`.
    """
    if package_version("vllm") is None:
        raise StartFault(
            "device cuda: no CUDA build of vllm is installed; pip install 'samebits[cuda]', or "
            "take the image samebits:cuda"
        )
    if not [*Path(nodes).glob("nvidia[0-9]*"), *Path(nodes).glob("dxg")]:
        raise StartFault(
            f"device cuda: no NVIDIA GPU is to be seen ({nodes}/nvidia0 …); start the container "
            "with --gpus all, or set SAMEBITS_DEVICE=cpu"
        )
    driver = machine.nvidia_driver(module)
    if driver is not None and int(driver.partition(".")[0]) < LEAST_NVIDIA_DRIVER:
        raise StartFault(
            f"device cuda: NVIDIA driver {driver} is too old for CUDA 13; install "
            f"{LEAST_NVIDIA_DRIVER} or newer on the host"
        )


def check_machine(settings: Settings, device: str, *, shared: str = "/dev/shm") -> None:
    """What a start can't do without, looked at before minutes are spent. Raises `StartFault`."""
    if device == "cuda":
        check_gpu()
    home = cache_dir()
    try:
        home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
    except OSError as fault:
        raise StartFault(
            f"cache {home}: {fault.strerror}; set SAMEBITS_CACHE_DIR to a folder that user "
            f"{os.getuid()} can write"
        ) from None
    room = shutil.disk_usage(shared).total if os.path.isdir(shared) else SHARED_BYTES
    if settings.tensor_parallel_size > 1 and room < SHARED_BYTES:
        raise StartFault(
            f"shared memory: {shared} has {room >> 20} MiB, ranks need {SHARED_BYTES >> 20}; "
            "start the container with --shm-size=1g"
        )
    memory = machine.memory_limit()
    wanted = (settings.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES) + LEAST_BYTES
    if device == "cpu" and memory < wanted:
        raise StartFault(
            f"memory: this process may take {memory >> 20} MiB, and needs {wanted >> 20} beside "
            "the weights; give it more, or lower SAMEBITS_KV_CACHE_MEMORY_BYTES"
        )


def check_folder(path: Path) -> None:
    """Raise `StartFault` if a model folder is half-copied: no config, no or missing weights."""
    if path.is_file():
        return
    config = path / "config.json"
    if not config.is_file():
        raise StartFault(f"model {path}: no config.json in it; copy the whole model folder")
    try:
        described = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as fault:
        raise StartFault(f"model {path}: config.json can't be read ({fault})") from None
    if not described.get("architectures"):
        raise StartFault(f"model {path}: config.json names no architecture")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(name for name in names if not (path / name).is_file())
        if missing:
            raise StartFault(
                f"model {path}: {len(missing)} weight files missing ({missing[0]} …); copy it again"
            )
    elif not any(
        file.suffix in (".safetensors", ".bin", ".gguf", ".pt") for file in path.iterdir()
    ):
        raise StartFault(f"model {path}: no weight files in it; copy the whole model folder")
    if not any(path.glob("*.safetensors")):
        return
    for file in path.glob("*.safetensors"):
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """The header's offsets must end where the file ends: a cut copy is found before loading."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size or length > 1 << 28:
            raise StartFault(f"model file {file}: damaged header; copy it again")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise StartFault(f"model file {file}: damaged header; copy it again") from None
    ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
    if 8 + length + max(ends, default=0) != size:
        raise StartFault(
            f"model file {file}: {size} bytes, but its header speaks of "
            f"{8 + length + max(ends, default=0)}; copy it again"
        )


def engine_args(start: Start) -> Any:
    """vLLM's AsyncEngineArgs: the user's options under vLLM's own names, then what is forced."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = start.settings
    options: dict[str, Any] = {
        name: value
        for name in (
            "tokenizer revision trust_remote_code dtype max_model_len load_format quantization "
            "max_num_seqs max_num_batched_tokens block_size enable_prefix_caching "
            "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override "
            "tensor_parallel_size enforce_eager max_logprobs"
        ).split()
        if (value := getattr(settings, name)) is not None
    }
    options |= {"model": start.model, "served_model_name": [start.name], "seed": 0}
    options["structured_outputs_config"] = {"backend": GRAMMAR_BACKEND}  # also when off
    options |= {"disable_log_stats": False, "enable_log_requests": False}
    if start.device == "cpu":
        options.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
        if settings.tensor_parallel_size == 1:
            options["distributed_executor_backend"] = "ops.executor.InProcessExecutor"
    if settings.determinism == "on":
        options["worker_extension_cls"] = "ops.worker.CheckExtension"
    return AsyncEngineArgs(**(options | dict(start.forced.options)))


def build(start: Start) -> Any:
    """An AsyncLLM, its processes started and the weights loaded. Blocks; run it in a thread.

    On the CPU the engine's process is a fork of this one, so that torch and vLLM are imported
    once. That is safe because nothing here has used OpenMP or a device by then.
    """
    eager = start.settings.determinism == "on" or start.settings.enforce_eager
    if start.device == "cpu" and eager:  # without the promise vLLM may compile, and needs all of it
        from server import vllm_lean

        vllm_lean.prepare()
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        config = engine_args(start).create_engine_config()
    except (ValueError, OSError, RuntimeError, KeyError) as fault:
        raise StartFault(f"model {start.model}: {last_words.one_line(fault)}") from fault
    if start.device == "cpu" and start.settings.tensor_parallel_size == 1:
        determinism.export({"VLLM_WORKER_MULTIPROC_METHOD": "fork"})
    with last_words.heard() as words:
        try:
            return AsyncLLM.from_vllm_config(config)
        except RuntimeError as fault:
            if not (cause := words.cause(fault)):
                raise
            raise StartFault(cause) from fault


def local_files(name: str, revision: str | None = None) -> Path:
    """The folder that holds a model's or tokenizer's files, also when it was named by a hub's id;
    they are there by now.
    """
    if os.path.exists(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def fingerprint_tree(start: Start, config: Any, report: dict[str, Any]) -> dict[str, Any]:
    """The tree behind `system_fingerprint`, from what vLLM really decided."""
    model, cache = config.model_config, config.cache_config
    settings = start.settings
    template = None
    if settings.chat_template:
        template = Path(settings.chat_template).read_text(encoding="utf-8")
    files = fingerprint.model_part(
        local_files(start.model if os.path.exists(start.model) else model.model, settings.revision),
        tokenizer_folder=local_files(settings.tokenizer) if settings.tokenizer else None,
        chat_template=template,
        trust_remote_code=settings.trust_remote_code,
        load_format=settings.load_format,
        cache_path=cache_dir() / "weights.json",
        progress=weights.told(lambda words: _log.info("hashing weights: %s", words)),
    )
    described = json.loads(json.dumps(model.hf_config.to_dict(), default=str))
    engine = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "kv_cache_dtype": cache.cache_dtype,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "enforce_eager": model.enforce_eager,
        "load_format": str(config.load_config.load_format),
        "attention_backend": report.get("attention_backend"),
        "max_model_len": model.max_model_len if fingerprint.context_matters(described) else None,
    }
    return fingerprint.build_tree(
        files,
        engine=engine,
        ops=report,
        device=machine.device_facts(start.device),
        forced={**start.forced.env, **start.forced.options},
        determinism=settings.determinism,
    )
