"""Compiles the Ascend kernels without an NPU, down to Ascend's HIVM IR, and says what it saw.

    TRI_ENV/bin/python tests/ascend/offline.py [KERNEL ...]      prints one JSON object

triton-ascend turns a kernel into linalg, ascendnpu-ir's bishengir-compile turns that into HIVM and
checks the unified buffer and L0C. Its last step, the closed `hivmc`, is not to be had; a stand-in
takes its place, records what it is given, and writes nothing. So this proves that the kernels
lower and fit, never that they run. The compilers here (3.2.0, 1.2.0) are not those of the images.

Runs in an environment without torch: the kernels' modules see an empty module of that name.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

TARGETS = ("Ascend910B1", "Ascend910B4", "Ascend910_9391")
HIVMC = """#!/bin/sh
case "$*" in *--version*) echo "hivmc 1.2.0"; exit 0;; esac
out=; for word in "$@"; do
  [ -n "$out" ] && { : > "$word"; out=; }
  [ "$word" = -o ] && out=1
  [ -f "$word" ] && case "$word" in *.mlir) cp "$word" "$HIVMC_RECORD";; esac
done
exit 0
"""
ROWS = ("M", "rows", "pairs")
FLAGS = (
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)


class _Nothing(types.ModuleType):
    """A module whose every attribute is itself a name that can be written and called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name

    Tensor = dtype = Generator = object


class _Name:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")


def integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


def cases(tiles: dict[str, dict[str, int]], dtype: str = "bf16") -> dict[str, dict[str, Any]]:
    """{name: {module, kernel, signature, constants, dots}} with the tiles of
    ops/backends/ascend."""
    matmul, experts = tiles["MATMUL"], tiles["EXPERTS"]

    def blocks(tile: dict[str, int]) -> dict[str, int]:
        return {f"BLOCK_{x}": tile[f"block_{x.lower()}"] for x in "MNK"}

    linear = {
        "module": "linear",
        "kernel": "_linear_kernel",
        "signature": {
            **pointers(dtype, "x_ptr", "w_ptr", "b_ptr", "y_ptr"),
            **integers("M N K segment_k stride_xm stride_wn stride_ym stride_ys"),
        },
        "constants": {
            "HAS_BIAS": True,
            "SPLIT": 1,
            "PART": False,
            "EVEN_K": True,
            "GROUP_M": 8,
            "PRECISION": "ieee",
            **blocks(matmul),
        },
        "dots": 1,
    }
    bmm = {
        "module": "bmm",
        "kernel": "_bmm_kernel",
        "signature": {
            **pointers(dtype, "a_ptr", "b_ptr", "c_ptr"),
            **integers("M N K stride_ab stride_am stride_ak stride_bb stride_bk stride_bn"),
        },
        "constants": blocks(matmul),
        "dots": 1,
    }
    moe = {
        "module": "moe",
        "kernel": "_grouped_kernel",
        "signature": {
            **pointers(dtype, "x_ptr", "w_ptr", "y_ptr"),
            **pointers("fp32", "scale_ptr"),
            **pointers("i32", "row_ptr", "expert_ptr", "used_ptr"),
            **integers("pairs N K stride_x stride_we stride_wn"),
        },
        "constants": {"SLOTS": 8, "SCALE": True, "EVEN_K": True, **blocks(experts)},
        "dots": 1,
    }

    def norm(width: int, residual: bool) -> dict[str, Any]:
        block = 1 << (width - 1).bit_length()
        constants: dict[str, Any] = {"N": width, "GEMMA": False, "HAS_RESIDUAL": residual}
        constants |= {"BLOCK": block, "ROWS": max(1, 1024 // block) if block <= 256 else 1}
        constants["ALIGN"] = 16
        if not residual:
            constants |= {"r_ptr": None, "s_ptr": None}
        return {
            "module": "norm",
            "kernel": "_rms_norm_kernel",
            "signature": {
                **pointers(dtype, "x_ptr", "r_ptr", "w_ptr", "y_ptr", "s_ptr"),
                **integers("rows inner stride_outer stride_inner stride_r"),
                "eps": "fp32",
            },
            "constants": constants,
            "dots": 0,
        }

    chunks = -(-151936 // 4096)
    return {
        "linear with bias": linear,
        "linear with bias, K not a multiple": {
            **linear,
            "constants": {**linear["constants"], "EVEN_K": False},  # type: ignore[dict-item]
        },
        "bmm": bmm,
        "bmm fp32": {
            **bmm,
            "signature": {**bmm["signature"], **pointers("fp32", "a_ptr", "b_ptr", "c_ptr")},
        },  # type: ignore[dict-item]
        "grouped experts": moe,
        "sum of slots": {
            "module": "moe",
            "kernel": "_sum_slots_kernel",
            "signature": {**pointers(dtype, "x_ptr", "y_ptr"), **integers("N")},
            "constants": {"SLOTS": 8, "BLOCK": 1024},
            "dots": 0,
        },
        "silu times": {
            "module": "moe",
            "kernel": "_silu_mul_kernel",
            "signature": {**pointers(dtype, "x_ptr", "y_ptr"), **integers("N")},
            "constants": {"BLOCK": 1024},
            "dots": 0,
        },
        **{f"rms_norm {width}": norm(width, False) for width in (64, 128, 1024, 4096, 8192)},
        **{f"add rms_norm {width}": norm(width, True) for width in (1024, 4096, 8192)},
        "softmax chunk": {
            "module": "softmax",
            "kernel": "_chunk_kernel",
            "signature": {
                **pointers("fp32", "x_ptr", "m_ptr", "l_ptr"),
                **integers("rows N stride_x"),
            },
            "constants": {"CHUNKS": chunks, "BLOCK": 4096, "ALIGN": 16},
            "dots": 0,
        },
        **{
            f"{name} finish": {
                "module": "softmax",
                "kernel": "_finish_kernel",
                "signature": {
                    **pointers("fp32", "x_ptr", "m_ptr", "l_ptr", "y_ptr"),
                    **integers("rows N stride_x"),
                },
                "constants": {
                    "LOG": log,
                    "CHUNKS": chunks,
                    "WIDTH": 64,
                    "BLOCK": 4096,
                    "ALIGN": 16,
                },
                "dots": 0,
            }
            for name, log in (("softmax", False), ("log_softmax", True))
        },
        "sum and mean": {
            "module": "reduce",
            "kernel": "_sum_kernel",
            "signature": {
                **pointers(dtype, "x_ptr", "y_ptr"),
                **integers("rows N stride_x"),
                "divisor": "fp32",
            },
            "constants": {"BLOCK": 1024, "ALIGN": 16},
            "dots": 0,
        },
        **draw(),
        # Planted faults: what the checks have to catch.
        "planted: too wide a tile": {
            **bmm,
            "constants": {"BLOCK_M": 512, "BLOCK_N": 512, "BLOCK_K": 64},
        },
        "planted: a row too long": norm(32768, True),
        "planted: split K with atomics": {
            "module": "planted",
            "kernel": "split_k",
            "signature": {
                **pointers("fp32", "a_ptr", "b_ptr", "c_ptr"),
                **integers("M N K"),
            },
            "constants": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64},
            "dots": 1,
        },
    }


def draw() -> dict[str, dict[str, Any]]:
    """The seeded draw over a vocabulary of 151,936. On an NPU the definition itself draws, in
    torch's ops; these are compiled so that they can take its place. The filters are draw_judge's:
    3.2.0 crashes on draw_filter's search, and 1.2.0 was not done with draw's `_settle_kernel` after
    100 s.
    """
    vocab, group, lanes = 151936, 128, 128  # with 512 lanes, CUDA's, the compiler needs minutes
    groups = -(-vocab // group)
    table = {**pointers("i32", "table_ptr", "slot_ptr"), **pointers("i64", "position_ptr")}
    shared = {
        "GROUP": group,
        "GROUPS": 1 << (groups - 1).bit_length(),
        "COVER": 4 * lanes // group,
        "LANES": lanes,
        "SPLIT": True,
        "WIDTH": 12,
        "PARTS": 64,
        "BLOCK": 1024,
    }

    def case(kernel: str, signature: dict[str, str], **constants: Any) -> dict[str, Any]:
        module = "draw_judge" if kernel in ("_kth_kernel", "_judge_kernel") else "draw"
        return {
            "module": module,
            "kernel": kernel,
            "signature": {**signature, **integers("V groups blocks parts stride_x")},
            "constants": {**shared, **constants},
            "dots": 0,
        }

    floats = pointers("fp32", "x_ptr", "peak_ptr", "best_ptr", "edge_ptr", "score_ptr")
    held = {**floats, **pointers("i32", "id_ptr"), **pointers("i64", "out_ptr"), **table}
    judged = {**pointers("fp32", "kth_ptr"), **pointers("i32", "left_ptr")}
    return {
        "draw: greedy": case("_greedy_kernel", held),
        "draw: peaks": case("_peaks_kernel", held, TILE=16),
        "draw": case("_draw_kernel", held, CUT=False, EDGES=False),
        "draw, filtered": case("_draw_kernel", held, CUT=True, EDGES=True),
        "draw: finish": case("_finish_kernel", held),
        "draw: last of top_k": case("_kth_kernel", {**held, **judged}),
        "draw: judged by top_p": case("_judge_kernel", {**held, **judged}),
    }


def lowered(case: dict[str, Any], arch: str, **options: Any) -> tuple[str, str]:
    """(Triton IR, linalg) of one case. Raises what the compiler raises."""
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    package = "tests.ascend" if case["module"] == "planted" else "ops.kernels.triton"
    kernel = getattr(importlib.import_module(f"{package}.{case['module']}"), case["kernel"])
    names = set(kernel.arg_names)
    constants = {k: v for k, v in case["constants"].items() if k in names}
    known = case["signature"]  # the compiler takes the types by place, not by name
    signature = {k: known[k] for k in kernel.arg_names if k in known and k not in constants}
    left = names - set(constants) - set(signature)
    if left:
        raise TypeError(f"{case['kernel']}: no type is given for {sorted(left)}")
    target = GPUTarget("npu", arch, 0)
    backend = ascend.AscendBackend(target)
    source = ASTSource(kernel, signature=signature, constants=constants)
    chosen = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        chosen, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    metadata = {"target": target, **dataclasses.asdict(chosen)}
    module = ascend.make_ttir(module, metadata, chosen)
    text = str(module)
    return text, ascend.ttir_to_linalg(module, metadata, chosen, named_ops=True)


def compiled(linalg: str, arch: str, work: Path) -> tuple[bool, str, str]:
    """(fits, the compiler's last words, HIVM IR) of one lowered kernel."""
    import ascendnpuir

    binary = Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile"
    source, record = work / "in.mlir", work / "hivm.mlir"
    source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg))
    record.unlink(missing_ok=True)
    env = {**os.environ, "PATH": f"{work}:{os.environ['PATH']}", "HIVMC_RECORD": str(record)}
    command = [str(binary), str(source), f"--target={arch}", *FLAGS, "-o", str(work / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    words = (done.stdout + done.stderr).strip()[-300:]
    found = record.read_text() if record.exists() else ""
    return done.returncode == 0 and bool(found), words, found


def seen(case: dict[str, Any], arch: str, work: Path) -> dict[str, Any]:
    """What one kernel is on one chip: {fits, message, dots, k_loops, atomics, mma}."""
    try:
        ttir, linalg = lowered(case, arch)
    except Exception as fault:
        return {"fits": False, "message": f"{type(fault).__name__}: {fault}"[:300]}
    fits, message, hivm = compiled(linalg, arch, work)
    return {
        "fits": fits,
        "message": "" if fits else message,
        "dots": ttir.count("tt.dot "),
        "atomics": ttir.count("tt.atomic") + hivm.lower().count("atomic"),
        "mma": len(re.findall(r"call @mma_tile\w*\(|hivm\.hir\.mmadL1", hivm)),
        "specialised": specialised(case),
    }


def specialised(case: dict[str, Any]) -> list[str]:
    """Parameters that count rows and would still make Triton compile anew when they are 1."""
    package = "tests.ascend" if case["module"] == "planted" else "ops.kernels.triton"
    kernel = getattr(importlib.import_module(f"{package}.{case['module']}"), case["kernel"])
    return [p.name for p in kernel.params if p.name in ROWS and not p.do_not_specialize]


def main(wanted: list[str]) -> None:
    import triton  # noqa: F401

    sys.modules["torch"] = _Nothing("torch")
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    table = (root / "ops/backends/ascend.py").read_text()
    tiles = {
        name: eval(re.search(rf"^{name} = (\{{.*?\}})", table, re.M | re.S).group(1))  # type: ignore[union-attr]
        for name in ("MATMUL", "EXPERTS")
    }
    out: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "hivmc").write_text(HIVMC)
        (work / "hivmc").chmod(0o755)
        for name, case in cases(tiles).items():
            if not wanted or name in wanted:
                out[name] = {arch: seen(case, arch, work) for arch in TARGETS}
                out[name]["wanted_dots"] = case["dots"]
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
