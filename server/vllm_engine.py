"""The Engine over vLLM's AsyncLLM: opens it, verifies every rank, generates, translates errors."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from config.settings import Settings
from server import engine_probe, fingerprint
from server.engine import Health, ModelInfo, Output, Prompt, Sampling, ToolCall
from server.errors import EngineDead, EngineFailed, InvalidRequest, ServerError
from server.vllm_chat import Chat
from server.vllm_grammar import Grammars
from server.vllm_output import Translator, sampling_params
from server.vllm_start import Start, StartFault, build, fingerprint_tree
from server.vllm_text import TokenText

_log = logging.getLogger("samebits")
PING_S = 1.0
INLINE_CHARS = 2000


class NotVerified(StartFault):
    """A rank's ops are missing, differ, or failed their check."""

    exit_code = 3


class VllmEngine:
    """One in-process AsyncLLM and what the routes need to know of it. Made by `open_engine`."""

    def __init__(
        self, start: Start, llm: Any, report: dict[str, Any], tree: dict[str, Any]
    ) -> None:
        self._start = start
        self._llm = llm
        self._report = report
        config = llm.vllm_config
        tokenizer = self._tokenizer = llm.get_tokenizer()
        self._text = TokenText(tokenizer)
        self._chat = Chat(start.settings, tokenizer)
        vocab_size = config.model_config.get_vocab_size()
        self._grammars = Grammars(tokenizer, vocab_size, start.settings.max_grammar_s)
        self._tree = tree
        self._short = fingerprint.short(self._tree)
        self._info = ModelInfo(
            name=start.name,
            aliases=(),
            max_model_len=config.model_config.max_model_len,
            vocab_size=vocab_size,
            created=int(time.time()),
            max_logprobs=start.settings.max_logprobs,
            eos_token_ids=_eos(config, tokenizer),
            has_chat_template=self._chat.available,
            special_token_ids=self._text.special_ids,
            max_token_chars=max(map(len, tokenizer.get_vocab())),
            tool_parser=start.settings.tool_call_parser,
        )
        self._running: set[str] = set()
        self._stepped = time.monotonic()
        self._fault = ""
        self._pinging = asyncio.create_task(self._ping())

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def fingerprint(self) -> str:
        return self._short

    @property
    def fingerprint_tree(self) -> Mapping[str, Any]:
        return self._tree

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return tuple(int(i) for i in ids)

        if len(text) < INLINE_CHARS:  # a thread costs more than the work
            return encode()
        return await asyncio.to_thread(encode)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text = await asyncio.to_thread(
            self._tokenizer.decode, list(token_ids), skip_special_tokens=skip_special_tokens
        )
        return str(text)

    def token_text(self, token_id: int) -> str:
        return self._text.text(token_id)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        return await asyncio.to_thread(self._chat.render, messages, **options)

    async def parse_tools(
        self, text: str, tools: Sequence[Mapping[str, Any]], token_ids: Sequence[int] = ()
    ) -> tuple[str | None, tuple[ToolCall, ...]]:
        return await asyncio.to_thread(self._chat.parse_tools, text, tools, token_ids)

    async def grammar_fault(self, kind: str, text: str) -> str:
        return await self._grammars.fault(kind, text)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        request_id: str,
        priority: int = 0,
        whole: bool = False,
    ) -> AsyncGenerator[Output, None]:
        translator = Translator(self._text, sampling)
        try:
            plain = self._start.settings.determinism == "off"
            params = sampling_params(sampling, whole=whole, plain=plain)
        except ValueError as fault:
            raise InvalidRequest(str(fault)) from fault
        queue = await self._add(prompt, params, request_id, priority)
        finished = False
        said: list[int] = []
        try:
            while not finished:
                found = queue.get_nowait() or await queue.get()
                finished = found.finished
                output = translator.output(found)
                said += output.token_ids
                if sampling.structured:
                    await self._grammars.check_end(sampling.structured, output, said)
                yield output
        except Exception as fault:
            finished = finished or not self._alive()
            raise self._translated(fault) from fault
        finally:
            self._running.discard(request_id)
            if not finished:
                await self._abort(queue.request_id)
            queue.close()

    async def _add(self, prompt: Prompt, params: Any, request_id: str, priority: int) -> Any:
        """Add a request so that leaving meanwhile loses nothing: vLLM would keep it for good."""
        adding = asyncio.ensure_future(
            self._llm.add_request(
                request_id,
                {"prompt_token_ids": list(prompt.token_ids)},
                params,
                priority=priority,
            )
        )
        self._running.add(request_id)
        try:
            return await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(self._forget)
            self._running.discard(request_id)
            raise
        except Exception as fault:
            self._running.discard(request_id)
            raise self._translated(fault) from fault

    def _forget(self, adding: asyncio.Future[Any]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            queue = adding.result()
            task = asyncio.ensure_future(self._abort(queue.request_id))
            task.add_done_callback(lambda _: queue.close())

    async def _abort(self, internal_id: str) -> None:
        if self._alive():
            await self._llm.abort(internal_id, internal=True)

    def _translated(self, fault: Exception) -> ServerError:
        """vLLM's exceptions become ours here only."""
        if isinstance(fault, ServerError):
            return fault
        if not self._alive() or type(fault).__name__ == "EngineDeadError":
            return EngineDead("the engine has stopped; the process is going down")
        if isinstance(fault, ValueError):
            return InvalidRequest(str(fault))
        _log.error("request failed in the engine: %r", fault)
        return EngineFailed("the engine failed on this request")

    def _alive(self) -> bool:
        return not self._llm.errored

    async def _ping(self) -> None:
        """Ask the engine's loop for a sign of life between its steps, once a second. The limit
        counts from the last sign, not from the question.
        """
        limit = max(self._start.settings.step_timeout_s - PING_S, 0.5)
        while self._alive():
            asked = time.monotonic()
            try:
                await asyncio.wait_for(self._llm.engine_core.is_sleeping_async(), limit)
                self._stepped, self._fault = time.monotonic(), ""
            except TimeoutError:
                self._fault = f"no engine step for {time.monotonic() - self._stepped:.0f} s"
            except Exception as fault:
                self._fault = f"the engine does not answer: {type(fault).__name__}"
            await asyncio.sleep(max(0.0, PING_S - (time.monotonic() - asked)))

    def health(self) -> Health:
        alive = self._alive()
        stuck = self._fault if alive else "the engine has stopped"
        return Health(
            alive=alive,
            ready=alive and not stuck,
            reason=stuck,
            determinism=self._start.settings.determinism,
            device=self._start.device,
            device_reason=self._start.device_reason,
            num_running=self._llm.output_processor.get_num_unfinished_requests() if alive else 0,
            num_waiting=0,
            report=self._report,
        )

    def metrics_text(self) -> bytes:
        from prometheus_client import REGISTRY, generate_latest

        return generate_latest(REGISTRY)

    def ops(self) -> list[str]:
        """The names of the ops in force on every rank."""
        return [row["op"] for row in self._report.get("table", [])]

    async def check_long(self, op: str) -> list[dict[str, Any]]:
        """The long check of one op on every rank (`samebits check`)."""
        found: list[dict[str, Any]] = await self._llm.collective_rpc(
            "check_ops_long", kwargs={"op": op}
        )
        return found

    async def close(self) -> None:
        self._pinging.cancel()
        await self._grammars.close()
        await asyncio.to_thread(self._llm.shutdown, 5.0)


async def open_engine(start: Start) -> VllmEngine:
    """Start vLLM, verify the ops on every rank, and only then hand the engine out.

    Raises `StartFault` when the model can't be served, `NotVerified` when an op is missing, is not
    the same on all ranks, or failed its check.
    """
    began = time.monotonic()
    llm = await asyncio.to_thread(build, start)
    try:
        report = await _verified(start.settings, llm)
        tree = await asyncio.to_thread(fingerprint_tree, start, llm.vllm_config, report)
        engine = VllmEngine(start, llm, report, tree)
    except BaseException:
        llm.shutdown(5.0)
        raise
    try:
        if start.settings.determinism != "off":
            await engine_probe.short(engine)
            if start.device != "cpu":
                await engine_probe.crowd(engine)
            report["checks"]["engine"] = "ok"
    except engine_probe.Differs as fault:
        await engine.close()
        raise NotVerified(f"the engine's answers are not invariant: {fault}") from fault
    except BaseException:
        await engine.close()
        raise
    gc.freeze()  # or every full collection walks through all of vLLM's modules: half a second
    gc.enable()
    _log.info(
        "engine open after %.1f s, fingerprint %s", time.monotonic() - began, engine.fingerprint
    )
    return engine


async def _verified(settings: Settings, llm: Any) -> dict[str, Any]:
    if settings.determinism == "off":
        _log.warning("DETERMINISM IS OFF: plain vLLM, no promise about bits")
        return {}
    try:
        ranks: list[dict[str, Any]] = await llm.collective_rpc("check_ops")
    except Exception as fault:
        raise NotVerified(f"the ops could not be checked: {fault}") from fault
    for rank, report in enumerate(ranks):
        for op, verdict in report["checks"].items():
            if verdict != "ok":
                raise NotVerified(f"rank {rank}: {op}: {verdict}")
        if not report["table"]:
            raise NotVerified(f"rank {rank}: no ops of ours are installed (plugin samebits)")
        if report["hash"] != ranks[0]["hash"]:
            raise NotVerified(f"rank {rank}: another table of ops than rank 0")
    return {**ranks[0], "ranks": len(ranks)}


def _eos(config: Any, tokenizer: Any) -> tuple[int, ...]:
    found = config.model_config.hf_config.get_text_config().eos_token_id
    ids = found if isinstance(found, list) else [found]
    return tuple(sorted({int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None}))
