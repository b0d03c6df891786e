"""The CPU kernels: `load()` gives the compiled ones where they can be had, else the pure-PyTorch
ones.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def load(isa: str | None = None) -> Any:
    """An object with the kernel functions, `.name` ("native-avx512", "native-avx2", "native-neon",
    "torch") and `.reason`.

    isa: None picks the best this machine has; a name forces it ("torch" forces the fallback). The
    same object is returned each time. Without a compiler the fallback is returned and `.reason`
    holds what went wrong; its bits differ from the native ones, and its name is part of the
    fingerprint.
    """
    from ops.kernels.cpu import build

    if isa == "torch":
        return _fallback("asked for")
    best = isa or build.machine_isa()
    if best is None:
        return _fallback("this CPU has none of AVX-512, AVX2 and NEON")
    try:
        from ops.kernels.cpu.native import Native

        library = build.build(best)
        origin = (
            "prebuilt"
            if library.parent == build.PREBUILT
            else f"compiled by {build.find_compiler()}"
        )
        return Native(library, best, f"{best} kernels, {origin}")
    except build.NoCompiler as fault:
        if isa is not None:
            raise
        return _fallback(str(fault))


def _fallback(reason: str) -> Any:
    from ops.kernels.cpu import fallback

    return fallback.load(reason)
