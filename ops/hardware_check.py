"""The acceptance run on an Ascend machine: everything that only hardware can show, in one report.

    samebits check --device npu --models Qwen3-1.7B Qwen3-8B --tp 1 2 4 8 --out report.json

which runs this module: python -m ops.hardware_check --model … --model … --tp … --out …

Steps: what the machine is; whether anything is missing; every op on one row and on many, at many
sizes and positions; all-reduce with different numbers of rows, ours and HCCL's own; each model end
to end, alone, together, in another order, and decoding while prompts arrive; speed with the
promise and without. A step that fails is written down and the next one runs. Exit code 0 if all
that could run held, 3 if something did not.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "samebits vllm vllm-ascend torch torch-npu triton-ascend transformers numpy fastapi".split()
)
LONG_SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256)
ROW_COUNTS = (1, 7, 63, 184, 736)
SHAPES = ((1024, 2048), (2048, 6144), (4096, 1536), (5120, 5120), (96, 70))
NEW_TOKENS = 32
MORE_PROMPTS = 24


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; returns the exit code."""
    parser = argparse.ArgumentParser(prog="samebits check --device npu", description=__doc__)
    parser.add_argument("--model", action="append", default=[], help="model folder or id")
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="tensor-parallel sizes")
    parser.add_argument("--out", default="samebits-ascend-report.json", help="the report")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--quick", action="store_true", help="few rows, narrow ops, short prompts")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        return _part(args)
    report: dict[str, Any] = {"samebits_ascend_report": 1, "began": _now(), "steps": []}
    for name, run in _steps(args):
        _say(f"{name} …")
        report["steps"].append(_step(name, run))
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")  # after each: power can fail
        last = report["steps"][-1]
        _say(f"{name}: {last['verdict']} ({last['seconds']} s) {last.get('message', '')}")
    held = all(step["verdict"] != "failed" for step in report["steps"])
    _say(f"report: {args.out}, {'all that ran held' if held else 'something did not hold'}")
    return 0 if held else 3


def _steps(args: argparse.Namespace) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("machine", machine),
        ("library, variables and versions", gate),
        ("ops", lambda: _child("ops", args)),
    ]
    for size in args.tp:
        if size > 1:
            steps.append((f"all-reduce on {size}", lambda w=size: _collectives(w, args)))  # type: ignore[misc]
    for model in args.model:
        for size in args.tp:
            steps.append(
                (f"{model} on {size}", lambda m=model, w=size: _model(m, w, args))  # type: ignore[misc]
            )
    return steps


def _step(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        found = {"verdict": "held", **run()}
    except Exception as fault:
        found = {
            "verdict": "failed",
            "message": f"{type(fault).__name__}: {fault}"[:2000],
            "traceback": traceback.format_exc()[-4000:],
        }
    return {"step": name, **found, "seconds": round(time.monotonic() - began, 1)}


# ---- steps in this process: no torch, no device ----


def machine() -> dict[str, Any]:
    """Versions, chip, toolkit, driver, forced variables as found."""
    from config import determinism, determinism_ascend
    from config.settings import environment

    env = environment()
    forced = [r.name for r in determinism.table("npu") if getattr(r, "kind", "") == "env"]
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "chip": determinism_ascend.chip(),
        "cann": determinism_ascend.cann_version(env),
        "npu_smi": _output("npu-smi", "info"),
        "variables_before": {name: env.get(name) for name in forced},
    }


def gate() -> dict[str, Any]:
    """Force the variables as `samebits serve` does, then what the start would refuse."""
    from config import determinism
    from config.settings import Settings

    forced = determinism.resolve(Settings.model_construct(device="npu"), "npu", _without_forced())
    determinism.export(forced.env)
    return _child_result(_run_child(["gate"], {}))


def _without_forced() -> dict[str, str]:
    """The environment less what the table forces: this run is ours, whatever the shell had set."""
    from config import determinism
    from config.settings import environment

    forced = {r.name for r in determinism.table("npu") if getattr(r, "kind", "") == "env"}
    return {k: v for k, v in environment().items() if k not in forced}


def _child(part: str, args: argparse.Namespace) -> dict[str, Any]:
    return _child_result(_run_child([part, args.dtype, *(["quick"] if args.quick else [])], {}))


def _collectives(size: int, args: argparse.Namespace) -> dict[str, Any]:
    if _devices() < size:
        return {"verdict": "not run", "message": f"{_devices()} devices"}
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/meet"
        running = [
            _start_child(["collectives", str(rank), str(size), meet], args) for rank in range(size)
        ]
        ranks = [_child_result(_finish(child)) for child in running]
    differing = [rank for rank in ranks if rank["ours"] != ranks[0]["ours"]]
    if differing or any(rank["verdict"] == "failed" for rank in ranks):
        return {"verdict": "failed", "message": "ranks differ or rows do", "ranks": ranks}
    return {"ranks": ranks}


def _model(model: str, size: int, args: argparse.Namespace) -> dict[str, Any]:
    if size > 1 and _devices() < size:
        return {"verdict": "not run", "message": f"{_devices()} devices"}
    words = [model, str(size), args.dtype, str(args.max_model_len)]
    more = ["quick"] if args.quick else []
    on = _child_result(_run_child(["engine", *words, "on", *more], {}))
    if args.quick:
        return on
    off = _step("promise off", lambda: _child_result(_run_child(["engine", *words, "off"], {})))
    off.pop("traceback", None)
    return {**on, "promise_off": off}


@functools.cache
def _devices() -> int:
    return int(_child_result(_run_child(["devices"], {}))["devices"])


# ---- steps in a process of their own ----


def _part(args: argparse.Namespace) -> int:
    """A child: prints one JSON line."""
    name, *words = args.part
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "gate": part_gate,
        "devices": part_devices,
        "ops": part_ops,
        "collectives": part_collectives,
        "engine": part_engine,
    }
    found = _step(name, lambda: parts[name](*words))
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0


def part_gate() -> dict[str, Any]:
    """What is missing in a worker's process, in words, and HCCL's own reading."""
    from ops import bindings_ascend_gate

    faults = bindings_ascend_gate.process_faults()
    found = {"faults": faults, "hccl_deterministic": bindings_ascend_gate.hccl_deterministic()}
    if faults:
        return {**found, "verdict": "failed", "message": faults[0]}
    return found


def part_devices() -> dict[str, Any]:
    """How many NPUs this process sees."""
    import torch
    import torch_npu  # noqa: F401

    return {"devices": torch.npu.device_count()}  # type: ignore[attr-defined]


def part_ops(dtype: str, quick: str = "") -> dict[str, Any]:
    """Every op of the table, bound, then compared at all sizes and at the widths of real models."""
    import torch
    import torch_npu  # noqa: F401

    from ops import bindings_ascend, bindings_ascend_check, registry
    from ops.backends import ascend

    torch.npu.set_device(0)  # type: ignore[attr-defined]
    registry.install(ascend.rows())
    bindings_ascend._state["started"] = True  # no worker here
    out: dict[str, str] = {}
    for row in registry.rows():
        out[row.op] = _verdict(row.check)
    kind = getattr(torch, dtype)
    sizes = (1, 2, 9) if quick else LONG_SIZES
    for name in bindings_ascend.ATEN:
        for width, columns in SHAPES[-1:] if quick else SHAPES:
            label = f"aten::{name} {width}x{columns} {dtype}"
            out[label] = _verdict(
                lambda n=name, w=width, c=columns: bindings_ascend_check.long_aten(  # type: ignore[misc]
                    n, sizes, w, c, kind
                )
            )
    wrong = {op: said for op, said in out.items() if said != "ok"}
    if wrong:
        return {"verdict": "failed", "message": next(iter(wrong.values())), "wrong": wrong}
    return {"compared": len(out)}


def part_collectives(rank: str, size: str, meet: str) -> dict[str, Any]:
    """All-reduce of known parts over HCCL with several row counts: ours, and HCCL's for the
    record."""
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    from ops import bindings_ascend_gate, collectives

    r, w = int(rank), int(size)
    torch.npu.set_device(r)  # type: ignore[attr-defined]
    dist.init_process_group("hccl", init_method=meet, rank=r, world_size=w)
    via = collectives.link()
    draw = torch.Generator().manual_seed(5)
    held = torch.randn(w, max(ROW_COUNTS), 5120, generator=draw).bfloat16()
    mine = held[r].npu()  # type: ignore[attr-defined]
    want = collectives.ordered_sum(held)
    ours, theirs = {}, {}
    stock = mine.clone()
    dist.all_reduce(stock)
    for rows in ROW_COUNTS:
        ours[rows] = torch.equal(collectives.all_reduce(mine[:rows], via).cpu(), want[:rows])
        part = mine[:rows].clone()
        dist.all_reduce(part)
        theirs[rows] = torch.equal(part, stock[:rows])
    found = {
        "ours": ours,
        "hccl_rows_equal": theirs,
        "hccl_deterministic": bindings_ascend_gate.hccl_deterministic(),
        "milliseconds": _collective_speed(mine, via),
    }
    strict = found["hccl_deterministic"] == bindings_ascend_gate.STRICT
    good = all(ours.values()) and strict
    return {**found, "verdict": "held" if good else "failed"}


def _collective_speed(x: Any, via: Any) -> dict[str, dict[int, float]]:
    import torch
    import torch.distributed as dist

    from ops import collectives

    ways: dict[str, Callable[[Any], Any]] = {
        "ours": lambda part: collectives.all_reduce(part, via),
        "hccl": lambda part: dist.all_reduce(part.clone()),
    }
    out: dict[str, dict[int, float]] = {}
    for name, way in ways.items():
        out[name] = {}
        for rows in ROW_COUNTS:
            part = x[:rows].clone()
            for _ in range(5):
                way(part)
            torch.npu.synchronize()  # type: ignore[attr-defined]
            began = time.perf_counter()
            for _ in range(20):
                way(part)
            torch.npu.synchronize()  # type: ignore[attr-defined]
            out[name][rows] = round((time.perf_counter() - began) / 20 * 1000, 4)
    return out


def part_engine(
    model: str, size: str, dtype: str, longest: str, promise: str, quick: str = ""
) -> dict[str, Any]:
    """One model in vLLM's engine: equal bits alone, together, shuffled, and beside prompts."""
    from config import determinism
    from config.settings import load

    settings = load(
        {
            "model": model,
            "device": "npu",
            "determinism": promise,
            "tensor_parallel_size": int(size),
            "max_model_len": int(longest),
            "max_num_batched_tokens": int(longest),
        }
    )
    forced = determinism.apply(settings, "npu")
    from vllm import LLM

    options = dict(forced.options) if promise == "on" else {"enable_prefix_caching": False}
    llm = LLM(
        model=model,
        dtype=dtype,
        tensor_parallel_size=int(size),
        max_model_len=int(longest),
        max_num_batched_tokens=int(longest),
        max_num_seqs=64,
        worker_extension_cls="ops.worker.CheckExtension",
        **options,
    )
    found: dict[str, Any] = {}
    if promise == "on":
        ranks = llm.collective_rpc("check_ops")
        wrong = {
            f"rank {r}: {op}": said
            for r, report in enumerate(ranks)
            for op, said in report["checks"].items()
            if said != "ok"
        }
        found |= {"table": ranks[0]["hash"], "checks": len(ranks[0]["checks"]), "wrong": wrong}
    compared = _compare(
        llm, int(longest), *((3, 2, 20) if quick else (NEW_TOKENS, MORE_PROMPTS, 3000))
    )
    found |= compared
    unequal = [name for name, equal in compared["equal"].items() if not equal]
    if promise == "on" and (unequal or found["wrong"]):
        return {**found, "verdict": "failed", "message": f"not equal: {unequal} {found['wrong']}"}
    return found


def _compare(llm: Any, longest: int, new_tokens: int, more: int, most: int) -> dict[str, Any]:
    from vllm import SamplingParams

    limit = min(longest - new_tokens, most)
    lengths = [n for n in (1, 5, 17, 128, 129, 500, 1500, 3000) if n <= limit]
    prompts = [[(7 * i + 13 * n) % 200 + 10 for i in range(n)] for n in lengths]
    others = [[(11 * i + n) % 200 + 10 for i in range(20 + 7 * n)] for n in range(more)]
    others = [other[:limit] for other in others]

    def params(i: int) -> Any:
        heat = 0.0 if i % 2 else 1.0
        return SamplingParams(
            temperature=heat, seed=100 + i, max_tokens=new_tokens, logprobs=5, ignore_eos=True
        )

    def run(which: Sequence[int], extra: Sequence[list[int]] = ()) -> dict[int, str]:
        batch = [{"prompt_token_ids": p} for p in [*(prompts[i] for i in which), *extra]]
        chosen = [params(i) for i in which] + [params(n) for n in range(len(extra))]
        outputs = llm.generate(batch, chosen, use_tqdm=False)
        return {i: _digest(outputs[at]) for at, i in enumerate(which)}

    everyone = range(len(prompts))
    alone: dict[int, str] = {}
    began = time.perf_counter()
    for i in everyone:
        alone |= run([i])
    one_stream = (time.perf_counter() - began) / (len(prompts) * new_tokens)
    began = time.perf_counter()
    together = run(everyone)
    crowd = run(everyone, others)
    busy = time.perf_counter() - began
    return {
        "equal": {
            "together": together == alone,
            "among others, decoding while they are prefilled": crowd == alone,
            "in another order": run(list(everyone)[::-1], others[::-1]) == alone,
            "again": run(everyone) == together,
        },
        "digests": [alone[i] for i in everyone],
        "seconds_per_token_alone": round(one_stream, 5),
        "tokens_per_second_together": round(
            (2 * len(prompts) + len(others)) * new_tokens / busy, 1
        ),
    }


def _digest(output: Any) -> str:
    chosen = output.outputs[0]
    tops = [sorted((t, x.logprob.hex()) for t, x in step.items()) for step in chosen.logprobs]
    return hashlib.sha256(json.dumps([list(chosen.token_ids), tops]).encode()).hexdigest()[:16]


# ---- pieces ----


def _start_child(words: Sequence[str], args: Any = None) -> subprocess.Popen[str]:  # noqa: ARG001
    command = [sys.executable, "-m", "ops.hardware_check", "--part", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _run_child(words: Sequence[str], _: Any) -> tuple[int, str, str]:
    return _finish(_start_child(words))


def _finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate()
    return child.returncode, out, err


def _child_result(done: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = done
    lines = out.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"the process ended with {code}: {err[-1500:]}") from None
    found.pop("step", None)
    found.pop("seconds", None)
    return found


def _verdict(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"[:500]
    return "ok"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout[-8000:]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _say(line: str) -> None:
    sys.stderr.write(f"{line.rstrip()}\n")


if __name__ == "__main__":
    sys.exit(main())
