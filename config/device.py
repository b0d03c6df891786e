"""Which device this start is for, and why. Standard library only; never initialises a device."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

DEVICES = ("cpu", "cuda", "npu")


@dataclass(frozen=True)
class Device:
    """`kind` is cpu | cuda | npu; `reason` is one sentence for the log and for `/health`."""

    kind: str
    reason: str


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def detect(wanted: str = "auto", *, device_nodes: str = "/dev") -> Device:
    """The device to serve on. `wanted` other than "auto" is taken as it is: the engine refuses it
    if it isn't there.

    "auto" takes an NPU or a GPU only if both its device node and its vLLM build are there; else the
    CPU.
    """
    if wanted != "auto":
        return Device(wanted, f"asked for (device={wanted})")
    npus = glob.glob(f"{device_nodes}/davinci[0-9]*")
    if npus and package_version("vllm-ascend"):
        return Device("npu", f"{len(npus)} Ascend device nodes and vllm-ascend are present")
    gpus = glob.glob(f"{device_nodes}/nvidia[0-9]*")
    if gpus and package_version("vllm"):
        return Device(
            "cuda", f"{len(gpus)} NVIDIA device nodes and a CUDA build of vllm are present"
        )
    if npus:
        return Device("cpu", "Ascend device nodes are present but vllm-ascend is not installed")
    if gpus:
        return Device(
            "cpu", "NVIDIA device nodes are present but no CUDA build of vllm is installed"
        )
    return Device("cpu", "no accelerator found")
