"""What reaches the device unseen is named: ops that nobody judged, whole or as parts of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from ops import recorder  # noqa: E402


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (lambda x: x + x.view(-1, 4)[0], []),
        (lambda x: x.cumprod(-1), ["aten::cumprod"]),
        (lambda x: x.cumsum(-1), ["aten::cumsum"]),
        (lambda x: (x > 0).long().cumsum(-1), []),
        (lambda x: x.unflatten(-1, (2, 2)), []),
        (lambda x: torch.layer_norm(x, (4,)), ["aten::native_layer_norm"]),
        (lambda x: torch.logcumsumexp(x, -1), ["aten::_logcumsumexp", "aten::logcumsumexp"]),
        (lambda x: x.sort().values, []),
    ],
)
def test_unproven_ops_are_named(
    run: Callable[[torch.Tensor], object], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no op of ours in force; so a part of layer_norm counts as unproven too."""
    from ops import registry

    monkeypatch.setattr(registry, "_installed", {})
    x = torch.randn(3, 4)
    with torch.inference_mode(), recorder.Recorder() as seen:
        run(x)
    found = recorder.unproven(seen)
    assert found == named or (named and set(found) <= set(named) and found)


def test_a_compiled_graph_makes_its_own_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for aten's reductions don't count there, and a GPU's single elements do."""
    from ops import registry

    row = registry.Override("", "", "", lambda: None, lambda: True, lambda: None)
    ours = dict.fromkeys(("aten::mean.dim", "aten::mm"), row)
    rows = tuple(dataclasses.replace(row, op=op) for op in ours)
    monkeypatch.setattr(registry, "rows", lambda: rows)
    x = torch.randn(4, 4)
    for compiled, device, named in (
        (False, "cpu", ["aten::silu"]), (False, "cuda", []), (True, "cuda", ["aten::mean.dim"]),
    ):  # fmt: skip
        with torch.inference_mode(), recorder.Recorder(compiled=compiled, device=device) as seen:
            torch.nn.functional.silu(torch.mm(x, x)).mean(-1)
        assert recorder.unproven(seen) == named


def test_the_compiled_parts_of_a_model_are_run_as_written() -> None:
    """vLLM's switch is set for the while, also when the run fails."""
    part = torch.nn.Linear(2, 2)
    part.do_not_compile = False
    with pytest.raises(RuntimeError), recorder._uncompiled(torch.nn.Sequential(part)):
        assert part.do_not_compile
        raise RuntimeError
    assert not part.do_not_compile
