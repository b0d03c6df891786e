"""The in-process executor: what it leaves out of vLLM's start, and when it doesn't."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ops.executor import InProcessExecutor


def started(*, eager: bool, size: int | None = 1 << 20) -> tuple[list[int], list[str]]:
    """What the engine is told about memory, and what the worker was asked to do for it."""
    asked: list[str] = []
    executor = object.__new__(InProcessExecutor)
    executor.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=size),
        model_config=SimpleNamespace(enforce_eager=eager),
    )

    def collective_rpc(method: str, *_: Any, **__: Any) -> list[int]:
        asked.append(method)
        return [size or 0]

    executor.collective_rpc = collective_rpc
    found = executor.determine_available_memory()
    executor.initialize_from_config([])
    return found, asked


def test_with_the_promise_nothing_is_warmed_up() -> None:
    assert started(eager=True) == ([1 << 20], ["initialize_from_config"])


def test_a_model_that_is_compiled_is_compiled_before_the_first_request() -> None:
    """In the first answer it took over a minute, and the answer was a 503."""
    found, asked = started(eager=False)
    assert found == [1 << 20]
    assert asked == ["determine_available_memory", "initialize_from_config"]


def test_the_size_must_be_known() -> None:
    with pytest.raises(ValueError, match="kv_cache_memory_bytes must be set"):
        started(eager=True, size=None)
