"""The driver half: the device of an Atlas A2, by its numbers only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class StandinDriver(DriverBase):
    """Active wherever the stand-in is on the path."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"num_aicore": 20, "num_vectorcore": 40}
    )

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", "Ascend910B1", 0)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("npu", 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing is timed on the stand-in NPU")
