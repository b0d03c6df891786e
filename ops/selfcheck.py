"""Bit-equality checks: each installed op alone, in batches, at several places, in other memory, and
again.

Every check calls the op as a model does, through the bound class or the dispatcher, so that a
binding that was undone fails too. Nothing here compares with a tolerance. The short version runs at
every start on every rank; `long_report` is the one behind `samebits check`.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ops.registry import NotInvariant, OpsError

SIZES = (1, 2, 3, 8, 17, 33, 64)
LONG_SIZES = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
DTYPES = (torch.float32, torch.bfloat16)
LONG_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Run = Callable[[Tensor], Tensor]
Case = tuple[str, Callable[[], None]]
Cases = Callable[[Sequence[int], Sequence[torch.dtype]], Iterator[Case]]


def same(op: str, case: str, got: Tensor, want: Tensor) -> None:
    """Raises `NotInvariant` with the op, the case and the first differing element, unless all bits
    are equal.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        raise NotInvariant(
            f"{op}: {case}: {got.dtype}{[*got.shape]} instead of {want.dtype}{[*want.shape]}"
        )
    a, b = _bits(got), _bits(want)
    if torch.equal(a, b):
        return
    where = (a != b).nonzero()
    index = tuple(where[0].tolist())
    raise NotInvariant(
        f"{op}: {case}: {len(where)} of {a.numel()} elements differ, first at {list(index)}: "
        f"{got[index].item()!r} instead of {want[index].item()!r}"
    )


def _bits(x: Tensor) -> Tensor:
    views = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
    return x.contiguous().view(views[x.dtype]) if x.dtype in views else x


def rows_cases(op: str, label: str, run: Run, x: Tensor, sizes: Sequence[int]) -> Iterator[Case]:
    """The cases for an op whose output row r must depend on input row r alone. The longest run is
    the yardstick.
    """
    n = max(sizes)
    x = x[:n].contiguous()
    want = run(x.clone())

    def case(name: str, got: Callable[[], Tensor], expected: Tensor) -> Case:
        return f"{label}, {name}", lambda: same(op, f"{label}, {name}", got(), expected)

    for m in sizes:
        yield case(f"first {m} of {n} rows", lambda m=m: run(x[:m].clone()), want[:m])  # type: ignore[misc]
        if m < n:
            yield case(f"last {m} of {n} rows", lambda m=m: run(x[n - m :].clone()), want[n - m :])  # type: ignore[misc]
    for r in sorted({0, 1, n // 2, n - 1}):
        yield case(f"row {r} alone", lambda r=r: run(x[r : r + 1].clone()), want[r : r + 1])  # type: ignore[misc]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    yield case("rows in another order", lambda: run(x[order]), want[order])
    yield case("at another address", lambda: run(_elsewhere(x)), want)
    yield case("again", lambda: run(x.clone()), want)
    yield case("on one thread", lambda: _on_threads(1, lambda: run(x.clone())), want)


def _elsewhere(x: Tensor) -> Tensor:
    """The same values one element further on, so that no vector load is aligned as before."""
    room = x.new_empty(x.numel() + 1)
    room[1:] = x.reshape(-1)
    return room[1:].view(x.shape)


def _on_threads(count: int, run: Callable[[], Tensor]) -> Tensor:
    from ops.kernels.cpu import load

    kernels = load()
    if not hasattr(kernels, "set_threads"):
        return run()
    before = kernels.threads
    kernels.set_threads(count)
    try:
        return run()
    finally:
        kernels.set_threads(before)


def _random(
    *shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0, seed: int = 11
) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


# -- cases by op
# ----------------------------------------------------------------------------------------------------  # noqa: E501
def linear_cases(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Linear layers as vLLM calls them: widths that fill tiles and widths that don't, with and
    without bias.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as method

    from ops.kernels.cpu import load

    op = "vllm.UnquantizedLinearMethod"
    for dtype in dtypes:
        for n, k, biased in ((96, 64, False), (131, 83, True)):
            packed = load().pack_weight(_random(n, k, dtype=dtype, std=0.03))
            layer = SimpleNamespace(samebits_packed=packed, weight=None)
            bias = _random(n, dtype=dtype, seed=5) if biased else None
            x = _random(max(sizes), k, dtype=dtype)
            yield from rows_cases(
                op,
                f"{dtype} {n}x{k}",
                lambda t, w=layer, b=bias: method.apply(None, w, t, b),
                x,
                sizes,
            )


def embedding_cases(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """The LM head, and that a packed table gives back the rows that went in."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod as method,
    )

    op = "vllm.UnquantizedEmbeddingMethod"
    for dtype in dtypes:
        table = _random(101, 72, dtype=dtype, std=0.03)
        layer = SimpleNamespace(weight=torch.nn.Parameter(table.clone(), requires_grad=False))
        x = _random(max(sizes), 72, dtype=dtype)
        yield from rows_cases(
            op, f"{dtype} head", lambda t, w=layer: method.apply(None, w, t), x, sizes
        )
        ids = torch.arange(101)
        name = f"{dtype} lookup"
        yield (
            name,
            lambda w=layer, i=ids, t=table, n=name: same(op, n, method.embedding(None, w, i), t),
        )  # type: ignore[misc]


def rms_norm_cases(name: str) -> Cases:
    """One of the norms, plain and with the residual added, at an even and an odd width."""

    def cases(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
        from vllm.model_executor.layers import layernorm

        forward = getattr(layernorm, name).forward
        for dtype in dtypes:
            for width in (64, 83):
                weight = _random(width, dtype=dtype, seed=5)
                layer = SimpleNamespace(
                    weight=weight, variance_epsilon=1e-6, variance_size_override=None
                )
                x = _random(max(sizes), 2 * width, dtype=dtype)

                def plain(t: Tensor, w: Any = layer, h: int = width) -> Tensor:
                    out: Tensor = forward(w, t[:, :h].contiguous())
                    return out

                def added(t: Tensor, w: Any = layer, h: int = width) -> Tensor:
                    return torch.cat(
                        forward(w, t[:, :h].contiguous(), t[:, h:].contiguous()), dim=1
                    )

                yield from rows_cases(f"vllm.{name}", f"{dtype} {width}", plain, x, sizes)
                yield from rows_cases(
                    f"vllm.{name}", f"{dtype} {width} with residual", added, x, sizes
                )

    return cases


def activation_cases(name: str) -> Cases:
    """One activation layer, at a width that no vector divides."""

    def cases(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
        from vllm.model_executor.layers import activation

        forward = getattr(activation, name).forward
        for dtype in dtypes:
            x = _random(max(sizes), 2 * 37, dtype=dtype, std=2.0)
            for approximate in ("none", "tanh") if name == "GeluAndMul" else ("",):
                layer = SimpleNamespace(approximate=approximate)
                label = f"{dtype} {approximate}".strip()
                yield from rows_cases(
                    f"vllm.{name}", label, lambda t, w=layer: forward(w, t), x, sizes
                )

    return cases


def rotary_cases(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Both styles, with a rotated part that is smaller than the head."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for dtype in dtypes:
        for head, part, neox in ((64, 64, True), (80, 32, False)):
            layer = SimpleNamespace(
                cos_sin_cache=_random(512, part, dtype=dtype),
                head_size=head,
                rotary_dim=part,
                is_neox_style=neox,
            )
            x = _random(max(sizes), 4 * head + 1, dtype=torch.float32)
            x[:, -1] = torch.arange(max(sizes)) * 7 % 512

            def run(t: Tensor, w: Any = layer, h: int = head, dt: torch.dtype = dtype) -> Tensor:
                q, k = t[:, : 3 * h].to(dt).contiguous(), t[:, 3 * h : 4 * h].to(dt).contiguous()
                return torch.cat(RotaryEmbedding.forward(w, t[:, -1].long(), q, k), dim=1)

            yield from rows_cases("vllm.RotaryEmbedding", f"{dtype} head {head}", run, x, sizes)


def attention_cases(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """One long prompt whole, chunked, token by token, in other blocks and block sizes, and beside
    other sequences.
    """
    for dtype in dtypes:
        for heads, kv_heads, head, options in (
            (6, 2, 64, {}),
            (2, 2, 80, {"window": 21}),
            (4, 1, 128, {"softcap": 30.0}),
        ):
            yield from _attention_cases(f"{dtype} {heads}/{kv_heads}x{head} "
                                        f"{options or ''}".strip(), dtype,
                                        heads, kv_heads, head, options, max(sizes))  # fmt: skip


def _attention_cases(
    label: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head: int,
    options: dict[str, Any],
    length: int,
) -> Iterator[Case]:
    op = "vllm.Attention"
    length = max(length, 40) + 3
    q = _random(length, heads, head, dtype=dtype)
    k, v = (
        _random(length, kv_heads, head, dtype=dtype, seed=5),
        _random(length, kv_heads, head, dtype=dtype, seed=6),
    )
    other = _random(length, heads, head, dtype=dtype, seed=7)

    def run(cuts: Sequence[int], block_size: int = 16, others: int = 0, shift: int = 0) -> Tensor:
        return paged(q, k, v, other, cuts, block_size, others, shift, options)

    want = run((length,))
    for name, arguments in (
        ("again", {"cuts": (length,)}),
        ("token by token", {"cuts": range(1, length + 1)}),
        ("chunked at 16", {"cuts": (*range(16, length, 16), length)}),
        ("chunked at 7", {"cuts": (*range(7, length, 7), length)}),
        ("blocks of 32", {"cuts": (length,), "block_size": 32}),
        ("in other blocks", {"cuts": (length,), "shift": 5}),
        ("behind 3 others", {"cuts": (9, length), "others": 3}),
        ("chunked behind 15 others", {"cuts": (1, 17, length), "others": 15}),
    ):
        full = f"{label}, {name}"
        yield full, lambda a=arguments, f=full: same(op, f, run(**a), want)  # type: ignore[misc]
    full = f"{label}, on one thread"
    yield full, lambda: same(op, full, _on_threads(1, lambda: run((length,))), want)


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    other: Tensor,
    cuts: Sequence[int],
    block_size: int,
    others: int,
    shift: int,
    options: dict[str, Any],
) -> Tensor:
    """Attention of one sequence through a paged cache, in steps that end at `cuts`, behind
    `others` of other lengths.
    """
    from ops.kernels.cpu import load

    kernels = load()
    length, kv_heads, head = k.shape
    per = -(-length // block_size)
    blocks = per * (others + 1) + shift + 1
    cache = torch.full((blocks, kv_heads, block_size, 2 * head), 7.0, dtype=q.dtype)
    table = (torch.arange(per * (others + 1)) + shift).flip(0).view(others + 1, per).int()
    out = torch.empty_like(q)
    position = torch.arange(length)
    slots = [
        table[s, position // block_size].long() * block_size + position % block_size
        for s in range(others + 1)
    ]
    for s in range(others):
        kernels.reshape_and_cache(other[:, :kv_heads].contiguous(), k, cache, slots[s])
    begin = 0
    for end in cuts:
        kernels.reshape_and_cache(k[begin:end], v[begin:end], cache, slots[others][begin:end])
        lens = [1 + (s * 13) % length for s in range(others)] + [end]
        counts = [1] * others + [end - begin]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        queries = torch.cat((other[:others], q[begin:end]))
        done = kernels.attention(
            queries,
            cache,
            table,
            starts,
            torch.tensor(lens, dtype=torch.int32),
            head**-0.5,
            **options,
        )
        out[begin:end] = done[others:]
        begin = end
    return out


def moe_cases(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Routing and experts through the bound method: rows that share experts and rows that don't."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as method,
    )

    from ops.kernels.cpu import load

    pack = load().pack_weight
    for dtype in dtypes:
        hidden, inner, count = 48, 40, 6
        layer = SimpleNamespace(
            samebits_w13=[pack(_random(2 * inner, hidden, dtype=dtype, std=0.1, seed=e)) for e in range(count)],  # noqa: E501
            samebits_w2=[pack(_random(hidden, inner, dtype=dtype, std=0.1, seed=50 + e)) for e in range(count)],  # noqa: E501
            top_k=2, renormalize=True, use_grouped_topk=False, custom_routing_function=None, scoring_func="softmax",  # noqa: E501
            e_score_correction_bias=None, apply_router_weight_on_input=False, expert_map=None,
            routed_scaling_factor=1.0, activation=SimpleNamespace(value="silu"),
        )  # fmt: skip
        x = _random(max(sizes), hidden + count, dtype=dtype)

        def run(t: Tensor, w: Any = layer, h: int = hidden) -> Tensor:
            out: Tensor = method.apply_monolithic(
                None, w, t[:, :h].contiguous(), t[:, h:].contiguous()
            )
            return out

        yield from rows_cases("vllm.UnquantizedFusedMoEMethod", str(dtype), run, x, sizes)


_ATEN: dict[str, Run] = {
    "mm": lambda x: torch.mm(x, _random(x.shape[1], 51, dtype=x.dtype, std=0.1)),
    "addmm": lambda x: torch.addmm(
        _random(51, dtype=x.dtype), x, _random(x.shape[1], 51, dtype=x.dtype, std=0.1)
    ),
    "bmm": lambda x: torch.bmm(x[None], _random(1, x.shape[1], 51, dtype=x.dtype, std=0.1))[0],
    "baddbmm": lambda x: torch.baddbmm(
        _random(1, 1, 51, dtype=x.dtype),
        x[None],
        _random(1, x.shape[1], 51, dtype=x.dtype, std=0.1),
    )[0],
    "mv": lambda x: torch.mv(x, _random(x.shape[1], dtype=x.dtype)),
    "dot": lambda x: torch.stack([torch.dot(row, _random(x.shape[1], dtype=x.dtype)) for row in x]),
    "_softmax": lambda x: torch.softmax(x, -1),
    "_log_softmax": lambda x: torch.log_softmax(x, -1),
    "sum.dim_IntList": lambda x: torch.sum(x, dim=-1),
    "mean.dim": lambda x: torch.mean(x, dim=-1),
    "sum": lambda x: torch.stack([row.sum() for row in x]),
    "mean": lambda x: torch.stack([row.mean() for row in x]),
    "native_layer_norm": lambda x: torch.nn.functional.layer_norm(
        x,
        (x.shape[1],),
        _random(x.shape[1], dtype=x.dtype),
        _random(x.shape[1], dtype=x.dtype),
        1e-5,
    ),
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "silu": lambda x: torch.nn.functional.silu(x),
    "sigmoid": lambda x: torch.sigmoid(x),
    "tanh": lambda x: torch.tanh(x),
    "cos": lambda x: torch.cos(x * 100),
    "sin": lambda x: torch.sin(x * 100),
}


def aten_cases(name: str) -> Cases:
    """The cases of one of torch's own ops, called as a model would call it."""

    def cases(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
        for dtype in dtypes:
            x = _random(max(sizes), 77, dtype=dtype)
            yield from rows_cases(f"aten::{name}", str(dtype), _ATEN[name], x, sizes)

    return cases


def cases_of(op: str) -> Cases | None:
    """The generator of cases for an op by its row's name; None for one that brings a check of its
    own.
    """
    from ops.bindings.activations import KINDS

    name = op.partition("::")[2] or op.removeprefix("vllm.")
    if op.startswith("aten::"):
        return aten_cases(name) if name in _ATEN else None
    if name in (*KINDS, "GeluAndMul"):
        return activation_cases(name)
    if name in ("RMSNorm", "GemmaRMSNorm"):
        return rms_norm_cases(name)
    return {
        "UnquantizedLinearMethod": linear_cases,
        "UnquantizedEmbeddingMethod": embedding_cases,
        "RotaryEmbedding": rotary_cases,
        "Attention": attention_cases,
        "UnquantizedFusedMoEMethod": moe_cases,
    }.get(name)


# What a case's name says of the condition under which bits were compared; the first that fits.
CONDITIONS = (
    ("alone", r"row \d+ alone|token by token"),
    ("in a batch", r"first \d+ of|behind \d+ other"),
    ("at another place", r"last \d+ of"),
    ("in another order", r"another order"),
    ("in other memory", r"another address|other blocks|blocks of"),
    ("chunked", r"chunked at"),
    ("on one thread", r"one thread"),
    ("again", r"again|lookup"),
)
_conditions: dict[str, set[str]] = {}


def condition(case: str) -> str:
    """The condition that a case stands for, by its name; "otherwise" when none of `CONDITIONS`
    fits.
    """
    return next((name for name, words in CONDITIONS if re.search(words, case)), "otherwise")


def conditions() -> dict[str, list[str]]:
    """Per op, the conditions under which this process has compared its bits and found them
    equal.
    """
    return {op: sorted(found) for op, found in sorted(_conditions.items())}


def check(op: str) -> Callable[[], None]:
    """The short check of an op, for its registry row: every case, small sizes; raises
    `NotInvariant`.
    """

    def run() -> None:
        cases = cases_of(op)
        if cases is None:
            raise OpsError(f"{op}: no check is written for it")
        torch_state = torch.random.get_rng_state()
        try:
            for name, case in cases(SIZES, DTYPES):
                case()
                _conditions.setdefault(op, set()).add(condition(name))
        finally:
            torch.random.set_rng_state(torch_state)

    return run


# -- reports
# --------------------------------------------------------------------------------------------------------  # noqa: E501
@contextmanager
def _timed(into: dict[str, Any]) -> Iterator[None]:
    begin = time.monotonic()
    try:
        yield
    finally:
        into["elapsed_s"] = round(time.monotonic() - begin, 3)


def rank_report(worker: Any, run_checks: bool) -> dict[str, Any]:
    """See `ops.worker.CheckExtension.check_ops`."""
    from config.settings import determinism_mode
    from ops import recorder, registry

    out: dict[str, Any] = {
        "rank": getattr(worker, "rank", 0),
        "mode": determinism_mode(),
        "kernels": "",
    }
    with _timed(out):
        out |= registry.report(run_checks)
        out["conditions"] = conditions()
        out["attention_backend"] = _attention_backend(worker)
        if out["mode"] == "on":
            out["kernels"] = _kernels()
            out["checks"]["forward"] = recorder.verdict(worker) if run_checks else "not run"
    return out


def _attention_backend(worker: Any) -> str:
    """The backends that this rank's attention layers use, by vLLM's names."""
    groups = getattr(getattr(worker, "model_runner", None), "attn_groups", [])
    names = {group.backend.get_name() for layer in groups for group in layer}
    return ", ".join(sorted(names))


def _kernels() -> str:
    """The kernels in force on this rank's device, by name and reason."""
    from ops import device

    table = importlib.import_module(device.backend_module(device.detect().kind))
    return "{}: {}".format(*table.kernels())


def long_report(
    sizes: Sequence[int] | None = None, only: str | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Every case of every installed op (or of `only`) at all sizes and dtypes: {op: [{case, ok,
    message}]}. Runs all, raises nothing.
    """
    from ops import registry

    out: dict[str, list[dict[str, Any]]] = {}
    for row in registry.rows():
        if only not in (None, row.op):
            continue
        cases = cases_of(row.op)
        listed = (
            [("its own check", row.check)]
            if cases is None
            else cases(sizes or LONG_SIZES, LONG_DTYPES)
        )
        out[row.op] = [_one(name, case) for name, case in listed]
    return out


def _one(name: str, case: Callable[[], None]) -> dict[str, Any]:
    try:
        case()
    except OpsError as fault:
        return {"case": name, "ok": False, "message": str(fault)}
    return {"case": name, "ok": True, "message": ""}
