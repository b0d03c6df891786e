"""HCCL's place on a machine with several stand-in NPUs: gloo, on the host's view of the memory.

So the all-gathers and all-to-alls of `ops.collectives` move real bytes between real worker
processes of vllm-ascend. Its reductions are gloo's: what HCCL would add is not shown by this.

STANDIN_FAULT=link: a gather of more than 4 KiB on rank 1 loses a bit, as no link should.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from samebits_standin.device import host

FAULT = os.environ.get("STANDIN_FAULT") == "link"
MOVED = (
    "allgather _allgather_base allgather_into_tensor_coalesced allreduce allreduce_coalesced "
    "alltoall alltoall_base broadcast barrier gather recv reduce reduce_scatter "
    "_reduce_scatter_base scatter send"
).split()


class StandinHccl(dist.ProcessGroup):
    """A process group under the name hccl; every collective waits until it is done."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "hccl"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


def _moved(name: str) -> Any:
    def run(self: StandinHccl, *args: Any, **kwargs: Any) -> Any:
        work = getattr(self.inner, name)(*tree_map(host, args), **tree_map(host, kwargs))
        work.wait()
        if FAULT and name == "_allgather_base" and self.rank() and args[0].nbytes > 4096:
            host(args[0]).view(-1).view(torch.uint8)[0] ^= 1
        return work

    return run


for _name in MOVED:
    setattr(StandinHccl, _name, _moved(_name))


def install() -> None:
    """From now on this process makes its hccl groups here."""
    dist.Backend._plugins["HCCL"] = dist.Backend._BackendPlugin(StandinHccl, False)
