"""A scheduler under which the path of a row depends on its own request alone. For Ascend.

vllm-ascend chooses its attention path by the whole batch: dense keys only if every request in it
is at its first token, paged keys otherwise (`_build_attn_state`), and one call of the kernel for
prefill and decode rows together. So here

* a step is either prefill or decode, never both;
* a prompt is prefilled whole, in one step (chunked prefill and prefix caching are off, see
  config/determinism_ascend.py), so its rows always take the dense path, and all others the paged;
* nothing is ever preempted: a request enters only when every block that it could come to need, up
  to its max_tokens, is free and stays reserved. A preempted request would be prefilled again, and
  the keys of its answer would come from the other path.

Why this and not one attention call for each kind of row in a mixed batch: who runs with whom is
decided in Python, on the host, and can be proven on any machine; splitting calls reaches into
vllm-ascend's metadata for every backend. The price: running answers wait while a prompt is
prefilled, and a request with a large max_tokens holds memory that it may not use.

Imported by vLLM, by the name in `scheduler_cls`; importing it imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler


class PhaseScheduler(Scheduler):
    """vLLM's scheduler, shown either the waiting requests that fit or the running ones."""

    running: list[Any]
    waiting: Any
    skipped_waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        longest = self._blocks_for(self.max_model_len)
        if longest > self._blocks:
            raise ValueError(
                f"KV cache: {self._blocks} blocks, but one request of SAMEBITS_MAX_MODEL_LEN="
                f"{self.max_model_len} may need {longest}. Remedy: lower SAMEBITS_MAX_MODEL_LEN or "
                f"raise SAMEBITS_GPU_MEMORY_UTILIZATION."
            )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step: every admissible prompt that fits the budget, else one token for each
        answer."""
        ready = self._admissible()
        held, waiting, skipped = self.running, self.waiting, self.skipped_waiting
        self.waiting, self.skipped_waiting = self._queue(ready), self._queue(())
        if ready:
            self.running = []
            self.max_num_running_reqs -= len(held)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            if ready:
                self.running = [*held, *self.running]
                self.max_num_running_reqs += len(held)
            left = [*self.waiting, *self.skipped_waiting]
            taken = {id(r) for r in ready}
            self.waiting = self._queue([*left, *(r for r in waiting if id(r) not in taken)])
            self.skipped_waiting = self._queue(r for r in skipped if id(r) not in taken)

    def _admissible(self) -> list[Any]:
        """The waiting requests that may start now, in order; the first that does not fit bars the
        rest."""
        room = self._blocks - sum(self._blocks_of(request) for request in self.running)
        seats = self.max_num_running_reqs - len(self.running)
        ready: list[Any] = []
        for request in [*self.skipped_waiting, *self.waiting]:
            if self._is_blocked_waiting_status(
                request.status
            ) and not self._try_promote_blocked_waiting_request(request):
                continue
            room -= self._blocks_of(request)
            if room < 0 or len(ready) == seats:
                break
            ready.append(request)
        return ready

    @property
    def _blocks(self) -> int:
        return int(self.kv_cache_manager.block_pool.num_gpu_blocks) - 1  # one is vLLM's null block

    def _blocks_of(self, request: Any) -> int:
        longest = request.num_prompt_tokens + request.max_tokens
        return self._blocks_for(min(longest, self.max_model_len))

    def _blocks_for(self, tokens: int) -> int:
        groups: int = len(self.kv_cache_config.kv_cache_groups)
        return -(-tokens // int(self.block_size)) * groups

    def _queue(self, requests: Iterable[Any]) -> Any:
        queue = create_request_queue(self.policy)
        for request in requests:
            queue.add_request(request)
        return queue

    def _preempt_request(self, request: Any, timestamp: float) -> None:  # noqa: ARG002
        raise RuntimeError(
            f"request {request.request_id} was about to be preempted, though all its blocks were "
            "reserved; its bits would have changed"
        )
