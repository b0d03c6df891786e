"""One rank on the CPU without a process of its own: the worker lives in the engine's core process.

vLLM gives every CPU worker its own process, so that OpenMP can be bound by environment variables
at its start. The kernels here take their number of threads as an argument and give the same bits
for any, so that process buys nothing, and costs an import of torch and vLLM at the start and two
hops of interprocess communication per step.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InProcessExecutor(UniProcExecutor):
    """vLLM's single-process executor, for the CPU: no warm-up of shapes that nothing specialises
    on.

    A dummy batch at the start serves compilers and memory measuring. With the promise nothing is
    compiled, and the KV cache has the size that the settings gave it; `check_ops` runs the model
    once anyway. Without the promise vLLM may compile, and does so at the start too: in the first
    answer it would take longer than the front end waits for a step.
    """

    def _init_executor(self) -> None:
        """As vLLM's; and from now on this process ends with its server, however that ends."""
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
        super()._init_executor()
        gc.enable()  # the server turns it off while it starts
        # What is left to torch between our kernels is small. Its threads would only make each step
        # wait for a core that the front end may be using.
        torch._C.set_num_threads(1)  # vLLM has put a warning in the place of torch.set_num_threads

    def determine_available_memory(self) -> list[int]:
        """The KV cache's size in bytes as set. Raises `ValueError` when it was not set."""
        size = self.vllm_config.cache_config.kv_cache_memory_bytes
        if size is None:
            raise ValueError("kv_cache_memory_bytes must be set for the in-process executor")
        if not self.vllm_config.model_config.enforce_eager:
            super().determine_available_memory()  # vLLM's CPU worker compiles in this call
        return [size]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Allocate the KV cache; no warm-up follows."""
        self.collective_rpc("initialize_from_config", args=(kv_cache_configs,))


def _follow(parent: int) -> None:
    """Leave when the parent process is gone: a killed server can't tell its engine to stop."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
