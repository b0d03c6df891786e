"""Takes refusals out of the processes of a server on the stand-in NPU, which loads this where
STANDIN_TAKE_OUT names one: the test of that refusal then has to fail.
"""

from __future__ import annotations

import pytest

from tests.ops import taken_out as ops

TAKE: dict[str, ops.Take] = {
    "library": ops.replaced(f"{ops.GATE}:library_faults", list),
    "planted fault": ops.replaced(f"{ops.CHECKS}:same", lambda *_: None),
    "second owner": ops.any_owner,
}


def apply(name: str) -> None:
    """For good: this process is a server's."""
    TAKE[name](pytest.MonkeyPatch())
