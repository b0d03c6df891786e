"""y = x Wᵀ + b on CUDA: for each weight shape, a way for every number of rows, all with equal bits.

The definition is `triton.linear` with split 1: one ascending chain of 16 k per output element in
float32, one rounding. A plan holds, for each band of row counts, the fastest cuBLASLt algorithm
among the library's first unsplit ones. An algorithm enters a plan only after its results equalled
the definition bit for bit on this chip, on this weight, at numbers of rows all over its band, so
which of them wins a race changes speed and no bit; where none qualifies, the Triton kernel itself
runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ops.kernels import cublaslt
from ops.kernels.triton.linear import Tile, linear

BANDS = (
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
    2048,
    4096,
    8192,
)  # upper bounds of M; the last is open
CANDIDATES = 6  # per band
EVERY_ROW_COUNT = 64  # up to here an algorithm is proven at each number of rows; above, at five
_MOST_ELEMENTS = 2**27  # of y while planning; wider weights keep their last planned band

Way = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@dataclass(frozen=True)
class Band:
    """A way for up to `rows` rows, its name, and the microseconds it took when planned."""

    rows: int
    way: Way
    name: str
    us: float


def tile_for(rows: int, dtype: torch.dtype) -> Tile:
    """The Triton tile for M rows; bits do not depend on it."""
    if dtype == torch.float32:
        return Tile(32, 32, 32, 4, 2)
    if rows <= 16:
        return Tile(16, 32, 128, 4, 6)
    if rows <= 64:
        return Tile(64, 64, 64, 4, 6)
    if rows <= 256:
        return Tile(64, 64, 128, 4, 4)
    return Tile(128, 128, 64, 8, 4)


def proof_counts(low: int, high: int) -> list[int]:
    """The numbers of rows at which a way for `low` + 1 to `high` rows is proven, largest first."""
    if high <= EVERY_ROW_COUNT:
        return list(range(high, low, -1))
    return sorted({low + 1 + (high - low - 1) * i // 4 for i in range(5)}, reverse=True)


def by_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The definition itself, at the tile for x's rows."""
    return linear(x, weight, bias, tile=tile_for(x.shape[0], x.dtype))


class Planner:
    """Plans of one process, by weight shape. `plan` is called while weights load; `product` never
    measures inside a CUDA graph capture: an unplanned shape runs the definition there."""

    def __init__(self) -> None:
        self.plans: dict[tuple[Any, ...], tuple[Band, ...]] = {}
        self.weights: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._copies: list[torch.Tensor] = []

    @staticmethod
    def key(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Any, ...]:
        return (
            weight.device.index,
            *weight.shape,
            weight.stride(0),
            weight.dtype,
            bias is not None,
        )

    def plan(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[Band, ...]:
        """Measure and prove the bands of one weight [N, K], once per shape."""
        key = self.key(weight, bias)
        if key not in self.plans:
            self.plans[key] = tuple(self._bands(weight, bias))
            self.weights[key] = (weight, bias)  # one of each shape, for the self-check
            self._copies = []
        return self.plans[key]

    def _bands(self, weight: torch.Tensor, bias: torch.Tensor | None) -> list[Band]:
        columns = weight.shape[0]
        bands: list[Band] = []
        for low, rows in pairwise((0, *BANDS)):
            if bands and rows * columns > _MOST_ELEMENTS:
                break
            bands.append(self._best(low, rows, weight, bias))
        return bands

    def _best(
        self, low: int, rows: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Band:  # fmt: skip
        """The fastest proven way for `low` + 1 to `rows` rows."""
        columns, depth = weight.shape
        fallback = Band(rows, by_triton, "triton", float("inf"))
        if weight.dtype not in (torch.bfloat16, torch.float16) or not _library_takes(weight):
            return fallback
        seeded = torch.Generator(device=weight.device).manual_seed(rows)
        x = torch.randn((rows, depth), generator=seeded, device=weight.device)
        x = x.to(weight.dtype)
        wanted = by_triton(x, weight, bias)
        found = [fallback]
        try:
            algorithms = cublaslt.algorithms(rows, columns, depth, weight.dtype, 8)[:CANDIDATES]
        except cublaslt.CublasLtError:
            return fallback
        for algorithm in algorithms:
            way = cublaslt.product(algorithm, columns, depth, weight.dtype)
            try:
                proven = all(
                    torch.equal(way(x[:m], weight, bias), wanted[:m])
                    for m in proof_counts(low, rows)
                )
            except cublaslt.CublasLtError:
                continue
            if proven:
                us = self._time_us(lambda w, way=way: way(x, w, bias), weight, rows)
                found.append(Band(rows, way, str(algorithm), us))
        return min(found, key=lambda band: band.us)

    def _time_us(
        self, call: Callable[[torch.Tensor], Any], weight: torch.Tensor, rows: int
    ) -> float:
        """Microseconds of one product: a graph of several over copies that no L2 holds."""
        if not self._copies:
            count = max(2, min(16, int(2.5e8 // weight.nbytes) + 1))
            self._copies = [weight.clone() for _ in range(count)]
        copies = self._copies if rows <= 512 else self._copies[:2]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for copy in copies:
                call(copy)
        times = []
        for _ in range(4):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(copies))
        return float(statistics.median(times[1:]))

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [M, K] · weight [N, K]ᵀ + bias → [M, N]."""
        bands = self.plans.get(self.key(weight, bias))
        if bands is None:
            if torch.cuda.is_current_stream_capturing():
                return by_triton(_plain(x), weight, bias)
            bands = self.plan(weight, bias)
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, weight.shape[0]))
        for band in bands:
            if rows <= band.rows:
                return band.way(_plain(x), weight, bias)
        return bands[-1].way(_plain(x), weight, bias)


def _library_takes(weight: torch.Tensor) -> bool:
    """16-byte rows and unit stride, which cuBLASLt's fast kernels want."""
    return weight.stride(1) == 1 and weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0


def _plain(x: torch.Tensor) -> torch.Tensor:
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


planner = Planner()
