"""One server for the tests that only ask; tests that need other settings start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.live import Live, serving


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    with serving() as server:
        yield server
        assert server.settled(), "something was left in the engine"
