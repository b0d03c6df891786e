"""The compiler half: asked for, it raises."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class StandinCompiler(BaseBackend):
    """Never a compiler: TRITON_INTERPRET=1 keeps Triton from asking."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "npu"

    def hash(self) -> str:
        return "stand-in"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise RuntimeError("the stand-in NPU compiles nothing; set TRITON_INTERPRET=1")

    add_stages = load_dialects = get_module_map = parse_options
