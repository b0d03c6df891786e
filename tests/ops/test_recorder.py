"""What reaches the device unseen is named: ops that nobody judged, whole or as parts of others."""

from __future__ import annotations

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
