"""Takes each refusal out, one at a time, and runs the refusal's own test, which then has to fail.

    python -m tests.ops.taken_out [word]      all of them, or those with the word in their name

Prints one JSON object: for each refusal how its test ended. A test counts as failed only by its own
judgement (nothing was refused, or something else than it says), never because it broke.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

Take = Callable[[pytest.MonkeyPatch], None]
ENV = "TAKE_OUT"
# How a test says that the refusal did not come.
JUDGED = ("Failed: DID NOT RAISE", "assert ", "AssertionError", "ValueError: not enough values")


@dataclass
class Seen:
    """A pytest plugin: what failed, and with what words."""

    ran: int = 0
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        if report.failed:
            words = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", ""))
            judged = report.when == "call" and words.startswith(JUDGED)
            (self.failed if judged else self.broken).append(words.partition("\n")[0][:200])


# ---- ways to take one out ----


def row_of_the_table(name: str) -> Take:
    """One row of config/determinism*.py."""

    def take(patch: pytest.MonkeyPatch) -> None:
        from config import determinism, determinism_ascend

        for module, rows in (
            (determinism, "COMMON"),
            (determinism, "CPU"),
            (determinism, "CUDA"),
            (determinism_ascend, "ROWS"),
            (determinism_ascend, "REFUSED"),
        ):
            kept = tuple(row for row in getattr(module, rows) if row.name != name)
            patch.setattr(module, rows, kept)

    return take


def entry(place: str, name: str) -> Take:
    """One entry of a tuple of (name, …) or of a mapping; `place` is "module:NAME"."""

    def take(patch: pytest.MonkeyPatch) -> None:
        module, attribute = found(place)
        held = getattr(module, attribute)
        if isinstance(held, tuple):
            patch.setattr(module, attribute, tuple(row for row in held if name not in row[0]))
        else:
            patch.setattr(module, attribute, {k: v for k, v in held.items() if k != name})

    return take


def lines(place: str, begin: str) -> Take:
    """The lines with that beginning, out of what a function finds."""

    def take(patch: pytest.MonkeyPatch) -> None:
        module, attribute = found(place)
        whole = getattr(module, attribute)
        patch.setattr(
            module,
            attribute,
            lambda *args: [line for line in whole(*args) if not line.startswith(begin)],
        )

    return take


def refused_lines(begin: str) -> Take:
    """The lines with that beginning, before they are raised."""

    def take(patch: pytest.MonkeyPatch) -> None:
        from ops import bindings_ascend_gate as gate

        whole = gate.refuse
        patch.setattr(
            gate, "refuse", lambda faults: whole([f for f in faults if not f.startswith(begin)])
        )

    return take


def replaced(place: str, by: Any) -> Take:
    """A function, by one that refuses nothing."""

    def take(patch: pytest.MonkeyPatch) -> None:
        module, attribute = found(place)
        patch.setattr(module, attribute, by)

    return take


def found(place: str) -> tuple[Any, str]:
    import importlib

    name, _, attribute = place.partition(":")
    holder: Any = importlib.import_module(name)
    *outer, last = attribute.split(".")
    for part in outer:
        holder = getattr(holder, part)
    return holder, last


def careless_install(rows: Any) -> None:
    from ops import registry

    for row in rows:
        row.install()
        registry._installed[row.op] = row


def careless_report(run_checks: bool = True) -> dict[str, Any]:
    from ops import registry

    return {"checks": {row.op: "ok" for row in registry.rows()}}


async def careless_verified(_settings: Any, llm: Any) -> dict[str, Any]:
    return {"ranks": 2}


def whatever_the_offsets(patch: pytest.MonkeyPatch) -> None:
    from ops import bindings_ascend as bind

    whole = bind.rotary_layer
    patch.setattr(bind, "rotary_layer", lambda *args, offsets=None: whole(*args))


def one_source_less(name: str) -> Take:
    def take(patch: pytest.MonkeyPatch) -> None:
        from ops import bindings_ascend_gate as gate

        sources = ("library_faults", "variable_faults", "version_faults")
        patch.setattr(
            gate,
            "process_faults",
            lambda: [
                line for source in sources if source != name for line in getattr(gate, source)({})
            ],
        )

    return take


def vllms_own(method: str) -> Take:
    def take(patch: pytest.MonkeyPatch) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from ops.scheduling import PhaseScheduler

        patch.setattr(PhaseScheduler, method, getattr(Scheduler, method))

    return take


def any_owner(patch: pytest.MonkeyPatch) -> None:
    """Binding an op that someone holds replaces theirs, as torch allows on request."""
    import torch

    whole = torch.library.Library.impl
    patch.setattr(
        torch.library.Library,
        "impl",
        lambda self, name, kernel, key, **more: whole(
            self, name, kernel, key, **{**more, "allow_override": True}
        ),
    )


GATE, BIND, CHECKS = (
    "ops.bindings_ascend_gate",
    "ops.bindings_ascend",
    "ops.bindings_ascend_check",
)
# Those that a child of the test has to take out of itself; by name, through the environment.
IN_A_CHILD: dict[str, Take] = {
    "a second owner of an op": any_owner,
    "an op that a third party took": replaced(f"{BIND}:aten_is_ours", lambda _: True),
}


def apply(name: str) -> None:
    """Take one of `IN_A_CHILD` out of this process, for good."""
    IN_A_CHILD[name](pytest.MonkeyPatch())


def all_of_them() -> Iterator[tuple[str, str, Take]]:
    """(refusal, its test, how it is taken out)."""
    yield from of_the_table()
    yield from of_the_gate()
    yield from of_the_start()
    yield from of_the_ops()


def of_the_table() -> Iterator[tuple[str, str, Take]]:
    from tests.ops import test_ascend_table as table

    file = "tests/ops/test_ascend_table.py"
    for name, kind in table.BROKEN:
        test = f"{file}::test_refused_with_the_row_and_only_with_it[{name}-{kind}]"
        yield f"row {name}", test, row_of_the_table(name)
    for name, remedy in table.NOT_OFFERED.items():
        test = f"{file}::test_what_is_no_setting_is_refused_by_name[{name}-{remedy}]"
        yield f"no setting {name}", test, row_of_the_table(name)
        yield (
            f"forced {name}",
            f"{file}::test_what_is_no_setting_is_forced[{name}]",
            (replaced("config.determinism:resolve", unforced(name))),
        )
    for name, remedy in table.KEYS.items():
        test = f"{file}::test_what_is_no_setting_is_refused_by_name[{name}-{remedy}]"
        yield f"no key {name}", test, replaced("config.determinism:_keys", lambda _: set())
    for what, (row, env, _) in table.PROMISED.items():
        name = row or next(iter(env))
        name = name.removeprefix("SAMEBITS_").lower() if name.startswith("SAMEBITS_") else name
        test = f"{file}::test_a_refused_start_says_one_line_with_the_remedy[{what}]"
        yield f"command {what}", test, row_of_the_table(name)


def unforced(name: str) -> Any:
    from config import determinism

    whole = determinism.resolve

    def resolve(*args: Any) -> Any:
        forced = whole(*args)
        options = {k: v for k, v in forced.options.items() if k != name}
        return determinism.Forced(forced.device, forced.env, {name: "?", **options}, forced.rows)

    return resolve


def of_the_gate() -> Iterator[tuple[str, str, Take]]:
    from config import determinism_ascend
    from ops import bindings_ascend as bind
    from ops import bindings_ascend_gate as gate
    from tests.ops import test_ascend_gate as tests

    file, other = "tests/ops/test_ascend_gate.py", "tests/ops/test_ascend_refusals.py"
    for what in tests.ENGINE:
        test = f"{file}::test_one_thing_wrong_in_the_engine_is_one_fault[{what}]"
        yield f"engine {what}", test, entry(f"{GATE}:ENGINE", what)
    for name in tests.ADDITIONAL:
        test = f"{file}::test_an_option_of_vllm_ascend_that_came_out_on[{name}]"
        yield f"came out on {name}", test, entry("config.determinism_ascend:ADDITIONAL", name)
    for name in tests.forced():
        test = f"{file}::test_variables_are_read_back_in_every_process"
        yield f"read back {name}", test, lines(f"{GATE}:variable_faults", name)
    for name in ("batch_invariant_ops", "triton-ascend"):
        test = f"{file}::test_a_missing_library_is_no_warning"
        yield f"library {name}", test, lines(f"{GATE}:library_faults", name)
    hccl = replaced(f"{GATE}:hccl_faults", lambda _: [])
    yield "HCCL not strict", f"{file}::test_hccl_has_to_read_strict", hccl
    no_refusal = replaced(f"{GATE}:refuse", lambda _: None)
    yield "faults are raised", f"{file}::test_all_faults_are_in_the_message", no_refusal
    for begin, test in (
        ("vllm_ascend.init_batch_invariance", "test_a_worker_that_started_elsewhere"),
        ("torch.use_deterministic", "test_a_worker_whose_torch_is_not_deterministic"),
        ("HCCL", "test_a_worker_whose_hccl_is_not_strict"),
        ("batch_invariant_ops", "test_a_worker_whose_library_is_gone"),
    ):
        yield f"worker {begin}", f"{other}::{test}", refused_lines(begin)
    for what, _ in bind.EXPERTS_REFUSED:
        test = f"{other}::test_an_expert_layer_without_a_kernel[{what}]"
        yield f"experts {what}", test, entry(f"{BIND}:EXPERTS_REFUSED", what)
    yield "rotary offsets", f"{other}::test_rotary_offsets_have_no_kernel", whatever_the_offsets
    test = f"{other}::test_swiglu_along_another_dimension_has_no_kernel"
    yield "swiglu's dim", test, replaced(f"{BIND}:npu_swiglu", lambda x, dim: x)
    assert gate.ENGINE and determinism_ascend.TESTED


def of_the_start() -> Iterator[tuple[str, str, Take]]:
    from tests.ops import test_start_refusals as tests

    file = "tests/ops/test_start_refusals.py"
    install = replaced("ops.registry:install", careless_install)
    report = replaced("ops.registry:report", careless_report)
    yield "two owners in the table", f"{file}::test_a_second_owner_in_the_table", install
    yield "did not bind", f"{file}::test_an_override_that_did_not_bind", install
    yield "undone later", f"{file}::test_an_override_that_was_undone_later", report
    yield "a failed check", f"{file}::test_a_check_that_fails_is_the_ops_answer", report
    yield (
        "a device without a table",
        f"{file}::test_a_device_without_a_table",
        (replaced("ops.device:_BACKENDS", {"tpu": "ops.backends.cpu"})),
    )
    no_refusal = replaced(f"{GATE}:refuse", lambda _: None)
    yield "the plugin's faults", f"{file}::test_the_plugin_raises_what_it_finds", no_refusal
    yield (
        "an unknown mode",
        f"{file}::test_an_unknown_mode_of_the_promise",
        (replaced("config.settings:determinism_mode", lambda: "off")),
    )
    for source in tests.SOURCES:
        test = f"{file}::test_a_process_answers_for_all_three[{source}]"
        yield f"a process' {source}", test, one_source_less(source)
    for what in ("chip", "CANN", *tests.TESTED):
        name = what if what in ("chip", "CANN") else f"version of {what}"
        test = f"{file}::test_a_worker_reads_versions_again[{what}]"
        yield f"a worker's {name}", test, row_of_the_table(name)
    for where in ("process", "engine"):
        test = f"{file}::test_a_worker_with_a_fault_does_not_start[{where}]"
        yield f"a worker's start, {where}", test, no_refusal
    well = replaced("ops.recorder:verdict", lambda _: "ok")
    yield "a compiled model", f"{file}::test_a_compiled_model_is_refused", well
    yield (
        "an op that nobody judged",
        f"{file}::test_an_op_that_nobody_judged_is_refused",
        (replaced("ops.recorder:unproven", lambda _: [])),
    )
    yield (
        "ops judged",
        "tests/ops/test_recorder.py",
        (replaced("ops.recorder:_fine", lambda *_: True)),
    )
    for what in tests.RANKS:
        test = f"{file}::test_one_rank_that_differs_stops_the_start[{what}]"
        yield f"rank with {what}", test, replaced("server.vllm_engine:_verified", careless_verified)
    test = f"{file}::test_ranks_that_cannot_be_asked_stop_the_start"
    yield "ranks not asked", test, replaced("server.vllm_engine:_verified", careless_verified)


def of_the_ops() -> Iterator[tuple[str, str, Take]]:
    file = "tests/ops/test_start_refusals.py"
    yield (
        "a row that looks at others",
        f"{file}::test_a_row_that_looks_at_the_others_is_caught",
        (replaced(f"{CHECKS}:same", lambda *_: None)),
    )
    yield (
        "no number",
        f"{file}::test_an_attention_that_answers_no_number_is_caught",
        (replaced(f"{CHECKS}:_attend", lambda q, *_: q)),
    )
    yield (
        "no kernel at all",
        f"{file}::test_an_op_without_any_kernel_is_refused",
        (replaced(f"{BIND}:_stock", lambda *_: None)),
    )
    schedule = "tests/ops/test_scheduling.py"
    yield (
        "a cache too small",
        f"{schedule}::test_a_cache_too_small_for_one_request_stops_the_start",
        (vllms_own("__init__")),
    )
    yield (
        "preempted",
        f"{schedule}::test_without_reserving_vllm_preempts",
        (vllms_own("_preempt_request")),
    )
    together = "tests/ops/test_collectives.py"
    yield (
        "a scatter that does not divide",
        f"{together}::test_scatter_names_what_does_not_divide",
        (replaced("ops.collectives:reduce_scatter", lambda x, *_: x)),
    )
    yield (
        "a sum of bools",
        f"{together}::test_integers_are_exact_and_bools_refused",
        (replaced("ops.collectives:_accumulator", lambda dtype: dtype)),
    )
    dispatch = "tests/ops/test_ascend_dispatch.py"
    for name, test in (
        ("a second owner of an op", "test_a_second_owner_is_refused"),
        ("an op that a third party took", "test_who_overrides_us_later_is_seen"),
    ):
        yield name, f"{dispatch}::{test}", lambda patch, name=name: patch.setenv(ENV, name)


def run(test: str) -> Seen:
    seen = Seen()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([test, "-p", "no:cacheprovider", "--tb=short"], plugins=[seen])
    return seen


def main(word: str = "") -> None:
    out: dict[str, Any] = {}
    before: dict[str, Seen] = {}
    for name, test, take in all_of_them():
        if word not in name:
            continue
        if test not in before:
            before[test] = run(test)
        with pytest.MonkeyPatch.context() as patch:
            take(patch)
            after = run(test)
        whole = before[test]
        out[name] = {
            "test": test,
            "whole": "passes" if whole.ran and not whole.failed + whole.broken else "does not pass",
            "taken out": "fails" if after.failed and not after.broken else "does not fail",
            "words": (after.failed + after.broken or whole.failed + whole.broken or [""])[0],
        }
    sys.__stdout__.write("\n" + json.dumps(out) + "\n")


if __name__ == "__main__":
    os.environ.pop(ENV, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # hundreds of runs, and none needs one
    main(*sys.argv[1:])
