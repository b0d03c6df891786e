"""Everything that the promise forces: environment variables and engine options, per device, each
with its reason.

One table, applied once in the parent before torch or vLLM is imported, so that every process that
vLLM starts inherits it. A value of the user's that contradicts a row stops the start and names
both. This is the only module that writes `os.environ`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from config.settings import Settings

ALL = ("cpu", "cuda", "npu")
GRAMMAR_BACKEND = "guidance"  # names what it can't enforce, where XGrammar leaves it out
REMEDY = "Remedy: unset it, or SAMEBITS_DETERMINISM=off to serve without the promise."


class Conflict(ValueError):
    """A setting or variable of the user's contradicts the promise. One line per fault, each with
    its remedy.
    """


@dataclass(frozen=True)
class Force:
    """A variable or engine option with the one value that the promise allows.

    `kind` is "env" or "option". `value` None means: unset (env) or vLLM's None (option). `welcome`
    lists other values of the user's that express the same wish and are replaced in silence.
    `instead` says what to do for who wanted it; only options that are no setting here have one.
    """

    kind: str
    name: str
    value: Any
    devices: tuple[str, ...]
    reason: str
    source: str
    welcome: tuple[str, ...] = ()
    instead: str = ""


@dataclass(frozen=True)
class Refuse:
    """Something that breaks the promise. `found(settings, env)` says what was found, or None."""

    name: str
    devices: tuple[str, ...]
    reason: str
    remedy: str
    source: str
    found: Callable[[Settings, Mapping[str, str]], str | None]


Row = Force | Refuse


@dataclass(frozen=True)
class Forced:
    """What is in force: variables as set (None: removed), engine options, and the rows they came
    from.
    """

    device: str
    env: Mapping[str, str | None] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()


def _plugins(_: Settings, env: Mapping[str, str]) -> str | None:
    value = env.get("VLLM_PLUGINS")
    if value is None or "samebits" in [p.strip() for p in value.split(",")]:
        return None
    return f"VLLM_PLUGINS={value}"


def _setting(name: str) -> Callable[[Settings, Mapping[str, str]], str | None]:
    def found(settings: Settings, _: Mapping[str, str]) -> str | None:
        value = getattr(settings, name)
        return None if value in (None, False, "", 0) else f"SAMEBITS_{name.upper()}={value}"

    return found


def _env_on(*names: str) -> Callable[[Settings, Mapping[str, str]], str | None]:
    def found(_: Settings, env: Mapping[str, str]) -> str | None:
        for name in names:
            if env.get(name, "").strip().lower() not in ("", "0", "false", "off", "no"):
                return f"{name}={env[name]}"
        return None

    return found


COMMON: tuple[Row, ...] = (
    Force(
        "option",
        "generation_config",
        "vllm",
        ALL,
        "the model's generation_config.json would change what an absent field means",
        "vllm/config/model.py",
    ),
    Force(
        "option",
        "logprobs_mode",
        "raw_logprobs",
        ALL,
        "one definition of logprobs: before temperature, penalties and filters",
        "vllm/config/model.py",
    ),
    Force(
        "option",
        "disable_cascade_attn",
        True,
        ALL,
        "cascade attention is chosen by what the batch has in common",
        "vllm/v1/worker/gpu_model_runner.py",
    ),
    Force(
        "option",
        "speculative_config",
        None,
        ALL,
        "draft acceptance is not proven invariant",
        "vllm issue 41758",
        instead="serve the model without a draft",
    ),
    Force(
        "option",
        "enable_lora",
        False,
        ALL,
        "LoRA kernels are not proven invariant",
        "vllm issue 30018",
        instead="merge the adapter into the weights",
    ),
    Force(
        "option",
        "structured_outputs_config",
        {"backend": GRAMMAR_BACKEND},
        ALL,
        "auto keeps the backend of whoever came first; XGrammar drops parts of a schema",
        "vllm/v1/structured_output/__init__.py",
    ),
    Force(
        "option",
        "disable_custom_all_reduce",
        True,
        ALL,
        "picks its algorithm by message size",
        "vllm/distributed/device_communicators/custom_all_reduce.py",
    ),
    Force(
        "env",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "0",
        ALL,
        "its path depends on the neighbours; the draw is ours",
        "vllm issue 51187",
    ),
    Force(
        "env",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        None,
        ALL,
        "positions beyond the model's range have no defined result",
        "vllm/config/model.py",
    ),
    Refuse(
        "VLLM_PLUGINS",
        ALL,
        "leaves the plugin samebits out, and with it every invariant op",
        "add samebits to VLLM_PLUGINS or unset it",
        "vllm/plugins/__init__.py",
        _plugins,
    ),
    Refuse(
        "quantization",
        ALL,
        "no quantized kernel is proven invariant",
        "serve the unquantized model, or SAMEBITS_DETERMINISM=off",
        "no proof: tests/ops has no quantized case",
        _setting("quantization"),
    ),
)

CPU: tuple[Row, ...] = (
    Force(
        "env",
        "VLLM_BATCH_INVARIANT",
        None,
        ("cpu",),
        "on a CPU vLLM's flag sends RMSNorm and bmm to Triton; the ops here are our own",
        "vllm/model_executor/layers/batch_invariant.py",
        welcome=("1",),
    ),
    Force(
        "env",
        "VLLM_CPU_SGL_KERNEL",
        "0",
        ("cpu",),
        "chooses a GEMM by the number of rows",
        "vllm/model_executor/layers/utils.py",
    ),
    Force(
        "env",
        "VLLM_CPU_ATTN_SPLIT_KV",
        "0",
        ("cpu",),
        "splits KV by what is scheduled together",
        "csrc/cpu/cpu_attn_impl.hpp",
    ),
    Force(
        "option",
        "enforce_eager",
        True,
        ("cpu",),
        "the eager path is the proven one; compiled code fuses by shape",
        "vllm/platforms/cpu.py",
    ),
    Force(
        "option",
        "async_scheduling",
        False,
        ("cpu",),
        "not supported on a CPU",
        "vllm/platforms/cpu.py",
    ),
)

CUDA: tuple[Row, ...] = (
    Force(
        "env",
        "VLLM_BATCH_INVARIANT",
        "1",
        ("cuda",),
        "turns off vLLM's own batch-dependent paths around our ops",
        "vllm/model_executor/layers/batch_invariant.py",
    ),
    Force(
        "env",
        "VLLM_USE_V2_MODEL_RUNNER",
        None,
        ("cuda",),
        "the draw is bound into both model runners; the architecture decides which one is taken",
        "vllm/config/vllm.py",
    ),
    Force(
        "env",
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "0",
        ("cuda",),
        "picks its algorithm by message size",
        "vllm/distributed/device_communicators/symm_mem.py",
    ),
    Force(
        "env",
        "NCCL_ALGO",
        "allreduce:tree",
        ("cuda",),
        "one algorithm for every message size",
        "vllm/model_executor/layers/batch_invariant.py",
    ),
    Refuse(
        "sequence parallelism",
        ("cuda",),
        "splits rows by the batch",
        "unset the variable",
        "vllm/config/compilation.py",
        _env_on("VLLM_ENABLE_SEQUENCE_PARALLEL"),
    ),
)


def table(device: str) -> tuple[Row, ...]:
    """All rows for one device."""
    rows: Iterable[Row] = (*COMMON, *CPU, *CUDA)
    if device == "npu":
        from config.determinism_ascend import ROWS

        rows = (*rows, *ROWS)
    return tuple(row for row in rows if device in row.devices)


def not_offered(name: str) -> str | None:
    """Why an option of vLLM's, or a key of one, is no setting here, with the remedy: one line. None
    for a name that no row knows, and for a setting.
    """
    for row in (row for device in ALL for row in table(device)):
        if not isinstance(row, Force) or row.kind != "option" or name in Settings.model_fields:
            continue
        if name == row.name or name in _keys(row.value):
            instead = f", and {row.instead}" if row.instead else ""
            return f"no setting here: {row.reason}. Remedy: leave it out{instead}."
    return None


def _keys(value: Any) -> set[str]:
    """The keys of nested mappings."""
    if not isinstance(value, Mapping):
        return set()
    return {str(key) for key in value}.union(*(_keys(inner) for inner in value.values()))


def check(settings: Settings, device: str, env: Mapping[str, str]) -> list[str]:
    """Every contradiction between the user's wishes and the table, one line each; empty if there
    is none.
    """
    faults = []
    for row in table(device):
        if isinstance(row, Refuse):
            found = row.found(settings, env)
            if found:
                faults.append(f"{found}: {row.reason}. Remedy: {row.remedy}.")
        elif row.kind == "env":
            faults += _env_conflict(row, env)
        else:
            faults += _option_conflict(row, settings)
    return faults


def resolve(settings: Settings, device: str, env: Mapping[str, str]) -> Forced:
    """The forced variables and options, or `Conflict`. Changes nothing."""
    if settings.determinism == "off":
        return Forced(device, {"SAMEBITS_DETERMINISM": "off"}, {}, ())
    faults = check(settings, device, env)
    if faults:
        raise Conflict("\n".join(faults))
    rows = table(device)
    variables = {r.name: r.value for r in rows if isinstance(r, Force) and r.kind == "env"}
    options = {r.name: r.value for r in rows if isinstance(r, Force) and r.kind == "option"}
    return Forced(device, {"SAMEBITS_DETERMINISM": "on", **variables}, options, rows)


def apply(settings: Settings, device: str) -> Forced:
    """Resolve and write the variables into this process' environment, for it and all its
    children.
    """
    forced = resolve(settings, device, dict(os.environ))
    export(forced.env)
    return forced


def process_variables(settings: Settings, device: str) -> dict[str, str | None]:
    """Variables of the process that change no bit: threads, caches, vLLM's own log lines."""
    level = {"debug": "INFO", "error": "ERROR"}.get(settings.log_level, "WARNING")
    found: dict[str, str | None] = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", level),
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENGINE_READY_TIMEOUT_S": os.environ.get("VLLM_ENGINE_READY_TIMEOUT_S", "3600"),
    }
    if device == "cpu":
        threads = settings.num_threads or len(os.sched_getaffinity(0))
        found |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # A thread that waits for one that other work keeps off its core sleeps after some 50 us:
        # OpenMP's default of milliseconds turns a busy machine into a standing one.
        found["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "20000")
    return found


def export(variables: Mapping[str, str | None]) -> None:
    """Write variables into the environment; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _env_conflict(row: Force, env: Mapping[str, str]) -> list[str]:
    user = env.get(row.name)
    if user is None or user == row.value or user in row.welcome:
        return []
    wanted = "must be unset" if row.value is None else f"must be {row.value}"
    return [f"{row.name}={user}: {wanted} ({row.reason}). {REMEDY}"]


def _option_conflict(row: Force, settings: Settings) -> list[str]:
    user = getattr(settings, row.name, None)
    if row.name not in settings.model_fields_set or user is None or user == row.value:
        return []  # a default is no wish
    return [f"SAMEBITS_{row.name.upper()}={user}: must be {row.value} ({row.reason}). {REMEDY}"]
