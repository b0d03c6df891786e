"""Which backend table applies in this process. Never initialises a device."""

from __future__ import annotations

from config.device import Device
from config.device import detect as _configured
from ops.registry import NotInstalled

_BACKENDS = {"cpu": "ops.backends.cpu", "cuda": "ops.backends.cuda", "npu": "ops.backends.ascend"}


def detect() -> Device:
    """The device that vLLM chose, with the reason. Raises `NotInstalled` if vLLM runs on one we
    have no table for.
    """
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if kind not in _BACKENDS:
        raise NotInstalled(
            f"device {kind!r}: no table of batch-invariant ops; known are {', '.join(_BACKENDS)} "
            f"(remedy: run on one of them, or SAMEBITS_DETERMINISM=off for plain vLLM)"
        )
    found = _configured()
    if found.kind == kind:
        return found
    return Device(kind, f"vLLM's platform is {kind}")


def backend_module(kind: str) -> str:
    """Import path of the table of a device kind."""
    return _BACKENDS[kind]
