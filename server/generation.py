"""Running the choices of one request: admission, fan-out, merging, and the counts on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from server.answers import Job
from server.engine import Engine, Output, Sampling
from server.service import Service

Outputs = AsyncGenerator[tuple[int, Output], None]


async def run(
    service: Service,
    engine: Engine,
    jobs: Sequence[Job],
    request_id: str,
    *,
    receipt: bool,
    whole: bool,
) -> Outputs:
    """Yield (position in `jobs`, output) as they come. Closing it stops all choices in the engine.

    Holds a place in the engine for each choice from the first step to the last. The ids of engine
    requests are made here, from an id of the server's own. `receipt`: the last output of a choice
    carries one. `whole`: one output per choice is enough.
    """
    begun = time.perf_counter()
    if service.minter is not None:
        engine = service.minter.over(engine, receipt)
    with service.admission.admit(len(jobs)):
        streams = [
            engine.generate(
                job.prompt, job.sampling, request_id=f"{request_id}-{job.index}", whole=whole
            )
            if wants_engine(job.sampling)
            else _nothing()
            for job in jobs
        ]
        counts = _Counts(service, jobs, begun)
        async with aclosing(merge(streams)) as merged:
            async for item in merged:
                counts.take(*item)
                yield item


async def merge(streams: Sequence[AsyncGenerator[Output, None]]) -> Outputs:
    """Outputs of all streams as they come. The first fault of any of them ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, Output | Exception | None]] = asyncio.Queue(2 * len(streams))
    pumps = [asyncio.create_task(_pump(i, s, queue)) for i, s in enumerate(streams)]
    open_streams = len(streams)
    try:
        while open_streams:
            index, item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncGenerator[Output, None],
    queue: asyncio.Queue[tuple[int, Output | Exception | None]],
) -> None:
    fault: Exception | None = None
    try:
        async with aclosing(stream):
            async for output in stream:
                await queue.put((index, output))
    except Exception as raised:
        fault = raised
    await queue.put((index, fault))


async def peek(outputs: Outputs) -> Outputs:
    """Await the first output, then give all of them: faults before it still have their own
    status.
    """
    try:
        first = await anext(outputs)
    except StopAsyncIteration:
        return outputs
    except BaseException:
        await outputs.aclose()
        raise
    return _after(first, outputs)


async def _after(first: tuple[int, Output], outputs: Outputs) -> Outputs:
    async with aclosing(outputs):
        yield first
        async for item in outputs:
            yield item


def wants_engine(sampling: Sampling) -> bool:
    """Whether there is anything to compute: an echo without logprobs is only text."""
    return sampling.max_tokens > 0 or sampling.prompt_logprobs is not None


async def _nothing() -> AsyncGenerator[Output, None]:
    yield Output(finish_reason="length")


class _Counts:
    """Observes times and tokens of one request."""

    def __init__(self, service: Service, jobs: Sequence[Job], begun: float) -> None:
        self._metrics, self._begun = service.metrics, begun
        prompts = {job.prompt_index: len(job.prompt.token_ids) for job in jobs}
        self._prompt_tokens = sum(prompts.values())
        self._first_at: list[float] = [0.0] * len(jobs)
        self._tokens = [0] * len(jobs)
        self._any = False

    def take(self, index: int, output: Output) -> None:
        now = time.perf_counter()
        if not self._any:
            self._any = True
            if output.finish_reason is None or len(output.token_ids) <= 1:  # else a whole answer
                self._metrics.first_token.observe(now - self._begun)
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
        if not self._first_at[index]:
            self._first_at[index] = now
            self._metrics.cached_tokens.inc(output.num_cached_tokens)
        else:
            self._tokens[index] += len(output.token_ids)
        self._metrics.answer_tokens.inc(len(output.token_ids))
        if output.finish_reason is not None and self._tokens[index]:
            spent = now - self._first_at[index]
            self._metrics.per_token.observe(spent / self._tokens[index])
