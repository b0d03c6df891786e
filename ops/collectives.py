"""Collectives in one order: the bytes are moved by whatever backend there is, the adding is ours.

Meaning of a reduction over ranks 0..W-1, for every element by itself:

    acc = fp32(x[0]);  acc = acc + fp32(x[1]);  ...;  acc = acc + fp32(x[W-1]);  y = round(acc)

One rounding per addition in fp32 (fp64 for fp64, the integer itself for integers) and one to the
dtype of the input at the end. Nothing else enters: not the number of rows, not the size of the
message, not who arrives first. Backends order their own reductions by message size (rings, trees,
shared-memory chunks), so no backend's reduction is used; only its all-gather and its all-to-all,
which add nothing.

Two schemes with the same bits:
- gather: every rank collects all W tensors and adds them. One step, (W-1) x bytes received per
  rank.
- slices: all-to-all of W slices, each rank adds its own slice, all-gather of the results. Two
  steps, 2 (W-1)/W x bytes received per rank, and W times less to add. Taken above
  `GATHER_LIMIT_BYTES` if W > 2; with two ranks both schemes move the same bytes and gather has one
  step less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ops.registry import NotInvariant, Override

GATHER_LIMIT_BYTES = 256 * 1024
"""Per-rank message size above which more than two ranks exchange slices. It chooses a scheme,
never a bit."""

Move = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Link:
    """What moves the bytes of one group, and where this process stands in it.

    `all_gather(out[W, n], x[n])` and `all_to_all(out[W, n], x[W, n])` fill `out`, flat and
    contiguous, in rank order. `all_to_all` is None where the backend has none; then everything is
    gathered.
    """

    rank: int
    size: int
    all_gather: Move
    all_to_all: Move | None


def link(group: dist.ProcessGroup | None = None) -> Link:
    """The link of a torch.distributed group (None: the default group), on any backend."""

    def all_gather(out: torch.Tensor, x: torch.Tensor) -> None:
        dist.all_gather_into_tensor(_octets(out), _octets(x), group=group)

    def all_to_all(out: torch.Tensor, x: torch.Tensor) -> None:
        dist.all_to_all_single(_octets(out), _octets(x), group=group)

    return Link(dist.get_rank(group), dist.get_world_size(group), all_gather, all_to_all)


def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """[W, ...] -> [...]: the sum over the first dimension in ascending order, accumulated as the
    module says.

    Every element by itself: no reduction kernel, whose order would depend on the shape.
    """
    acc = parts[0].to(_accumulator(parts.dtype), copy=True)
    for part in parts[1:]:
        acc.add_(part)
    return acc.to(parts.dtype)


def all_reduce(x: torch.Tensor, via: Link) -> torch.Tensor:
    """The sum over all ranks, equal on every rank; a new tensor of x's shape and dtype, x
    untouched."""
    if via.size == 1 or x.numel() == 0:
        return x.clone()
    flat = x.contiguous().view(-1)
    if via.all_to_all is None or not _takes_slices(flat.nbytes, via.size):
        return ordered_sum(_gathered(flat, via)).view(x.shape)
    width = -(-flat.numel() // via.size)
    slices = flat.new_zeros(via.size * width)
    slices[: flat.numel()] = flat
    mine = ordered_sum(_exchanged(slices.view(via.size, width), via))
    return _gathered(mine, via).view(-1)[: flat.numel()].reshape(x.shape)


def reduce_scatter(x: torch.Tensor, via: Link, dim: int = -1) -> torch.Tensor:
    """This rank's part, of W equal ones along `dim`, of the sum over all ranks; the same bits as
    `all_reduce`.

    Raises `ValueError` when W does not divide the dimension.
    """
    if via.size == 1:
        return x.clone()
    if x.shape[dim] % via.size:
        raise ValueError(
            f"reduce_scatter: {via.size} ranks do not divide dimension {dim} of {tuple(x.shape)}"
        )
    front = x.movedim(dim, 0).contiguous()
    shape = (front.shape[0] // via.size, *front.shape[1:])
    slices = front.view(via.size, -1)
    if slices.numel() == 0:
        mine = slices[0]
    elif via.all_to_all is None:
        mine = ordered_sum(_gathered(front.view(-1), via).view(via.size, via.size, -1)[:, via.rank])
    else:
        mine = ordered_sum(_exchanged(slices, via))
    return mine.view(shape).movedim(0, dim).contiguous()


def _takes_slices(nbytes: int, size: int) -> bool:
    return size > 2 and nbytes > GATHER_LIMIT_BYTES


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex or dtype is torch.bool:
        raise TypeError(f"no ordered sum is defined for {dtype}")
    if dtype.is_floating_point and dtype is not torch.float64:
        return torch.float32
    return dtype


def _octets(x: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, flat: a backend that lacks bf16 can still carry it, and none can
    add it."""
    return x.view(-1).view(torch.uint8)


def _gathered(x: torch.Tensor, via: Link) -> torch.Tensor:
    out = x.new_empty((via.size, x.numel()))
    via.all_gather(out, x)
    return out


def _exchanged(slices: torch.Tensor, via: Link) -> torch.Tensor:
    assert via.all_to_all is not None
    out = torch.empty_like(slices)
    via.all_to_all(out, slices)
    return out


# ---- the device communicators of vLLM ----


def communicator_link(communicator: Any) -> Link:
    """The link of one of vLLM's device communicators: its shared memory where it has that, else
    its group."""
    module = getattr(communicator, "dist_module", dist)
    plain = link(communicator.device_group)
    if module is dist:
        return plain

    def all_gather(out: torch.Tensor, x: torch.Tensor) -> None:
        module.all_gather_into_tensor(out, x, group=communicator.device_group)

    return Link(plain.rank, plain.size, all_gather, plain.all_to_all)


def _communicator_all_reduce(self: Any, input_: torch.Tensor) -> torch.Tensor:
    """`DeviceCommunicatorBase.all_reduce`: see `all_reduce`."""
    return all_reduce(input_, communicator_link(self))


def _communicator_reduce_scatter(self: Any, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`DeviceCommunicatorBase.reduce_scatter`: see `reduce_scatter`."""
    return reduce_scatter(input_, communicator_link(self), dim)


_METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "all_reduce": _communicator_all_reduce,
    "reduce_scatter": _communicator_reduce_scatter,
}


def _cpu_class() -> Any:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    return CpuCommunicator


def _npu_class() -> Any:
    from vllm_ascend.distributed.device_communicators.npu_communicator import NPUCommunicator

    return NPUCommunicator


def _install(find: Callable[[], Any], method: str) -> None:
    setattr(find(), method, _METHODS[method])


def _installed(find: Callable[[], Any], method: str) -> bool:
    return getattr(find(), method, None) is _METHODS[method]


def _check(method: str) -> None:
    """The one order, alone and in any number of rows; across the ranks of this worker's group
    where there is one.

    Every rank of the group has to call it together, and does: the check of the ops is one call to
    all of them.
    """
    group = _tensor_parallel_group()
    remote = None if group is None else _differs_across_ranks(group, method)
    parts = _parts(4, torch.bfloat16, torch.device("cpu"))
    whole = ordered_sum(parts)
    if not all(torch.equal(ordered_sum(parts[:, :m]), whole[:m]) for m in (1, 7, 63)):
        raise NotInvariant(f"{method}: the sum in rank order depends on the number of rows")
    if remote is not None:
        raise NotInvariant(f"{method}: {remote}")


def _tensor_parallel_group() -> Any | None:
    """vLLM's tensor-parallel group of this process, or None outside a worker."""
    if not dist.is_initialized():
        return None
    from vllm.distributed import parallel_state

    group = parallel_state._TP
    return group if group is not None and group.world_size > 1 else None


def _differs_across_ranks(group: Any, method: str) -> str | None:
    """What differs when the group reduces known parts, in words; None if nothing does."""
    size, rank = group.world_size, group.rank_in_group
    for dtype in (torch.bfloat16, torch.float32):
        parts = _parts(size, dtype, group.device)
        want = ordered_sum(parts)
        for m in (1, 7, 64, parts.shape[1]):
            rows = m - m % size if method == "reduce_scatter" else m
            if rows == 0:
                continue
            mine = parts[rank, :rows].clone()
            if method == "all_reduce":
                got, expected = group.device_communicator.all_reduce(mine), want[:rows]
            else:
                step = rows // size
                got = group.device_communicator.reduce_scatter(mine, 0)
                expected = want[rank * step : (rank + 1) * step]
            if not torch.equal(got, expected):
                return (
                    f"{rows} rows of {dtype} on rank {rank} of {size} are not the sum in rank order"
                )
    return None


def _parts(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[W, 192, 512] known to every rank, of magnitudes mixed so that any other order of adding
    shows."""
    draw = torch.Generator().manual_seed(20260823)
    parts = (
        torch.randn(size, 192, 512, generator=draw)
        * torch.logspace(-3, 3, 512)[torch.randperm(512, generator=draw)]
    )
    return parts.to(dtype).to(device)


def _rows(name: str, find: Callable[[], Any]) -> tuple[Override, ...]:
    return tuple(
        Override(
            op=f"vllm.{name}.{method}",
            kernel=f"ops.collectives.{method}",
            reason="backends choose the order of a reduction by message size and arrival",
            install=partial(_install, find, method),
            installed=partial(_installed, find, method),
            check=partial(_check, method),
            tiles={"order": "rank", "accumulate": "fp32"},
        )
        for method in _METHODS
    )


CPU_ROWS = _rows("CpuCommunicator", _cpu_class)
NPU_ROWS = _rows("NPUCommunicator", _npu_class)
