"""vLLM's way in: `register` is the entry point of group vllm.general_plugins and runs in every
process of an engine.

Importing this module imports the standard library only, because a fault while vLLM *imports* a
plugin is logged and swallowed. All work, and every fault, happens inside `register`.
"""

from __future__ import annotations

import importlib
import logging

logger = logging.getLogger("samebits.ops")


def register() -> None:
    """Install every override of this device's table, once per process.

    Does nothing if determinism is off. Raises `OpsError` (or whatever broke) on any fault, which
    stops the process: an engine never starts half-covered.
    """
    from config.settings import determinism_mode

    if determinism_mode() == "off":
        logger.warning("determinism is off: plain vLLM ops, no promise about bits")
        return
    from ops import device, registry

    # It warns with the whole of a grammar that llguidance gives up on: a user's words, 64 KiB each.
    logging.getLogger("vllm.v1.structured_output.backend_guidance").setLevel(logging.ERROR)
    found = device.detect()
    table = importlib.import_module(device.backend_module(found.kind))
    registry.install(table.rows())
    logger.info(
        "%d ops installed on %s (%s): %s, %s",
        len(registry.rows()),
        found.kind,
        found.reason,
        *table.kernels(),
    )
