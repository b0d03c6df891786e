"""Receipts are minted where tokens leave the engine: an Engine around the engine, so that no
handler can forget.

    minter = Minter.from_settings(settings, engine)        # once source = minter.over(engine,
    wanted=…)                 # per request; the engine itself when nothing is to be minted async
    for output in source.generate(…): …              # the last output carries `receipt` where
    `wanted`

The log, where one is set, gets a line per finished choice, whatever `wanted` says. An answer that
was aborted has no receipt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import stat
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from config.settings import Settings
from server import fingerprint, receipts
from server.engine import Engine, Output, Prompt, Sampling
from server.errors import ServerError
from server.logprobs import finite
from server.receiptlog import LogFailed, ReceiptLog
from server.signing import Signer

_log = logging.getLogger("samebits.receipts")


# Any other end ("abort", "error") leaves no answer: the client gets an error, if anything.
WHOLE = frozenset({"stop", "length"})


class ReceiptLost(ServerError):
    """The receipts log can't be written and the setting says that no answer goes out without
    one.
    """

    status, code = 503, "receipts_unavailable"


def check_places(settings: Settings) -> None:
    """Before a model is loaded: whether the log can be appended to and the key can be read.

    Raises `BadPlace` or `BadKey`, naming the setting.
    """
    if settings.receipts_key_file:
        Signer.from_file(settings.receipts_key_file)
    if settings.receipts:
        try:
            file = os.open(settings.receipts, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o640)
            regular = stat.S_ISREG(os.fstat(file).st_mode)
            os.close(file)
            if not regular:  # /dev/null would take every line, and keep none
                raise OSError(errno.EINVAL, "not a regular file")
        except OSError as fault:
            raise BadPlace(
                f"SAMEBITS_RECEIPTS={settings.receipts}: {fault.strerror}; make the folder or name "
                "a file that can be written"
            ) from None


class BadPlace(ValueError):
    """The receipts log can't be written where the setting says."""


class Minter:
    """Makes receipts for one engine; owns the log and the key."""

    def __init__(
        self,
        engine: Engine,
        *,
        log: ReceiptLog | None = None,
        signer: Signer | None = None,
        full: bool = True,
        refuse: bool = True,
    ) -> None:
        self.signer = signer
        self.log = log
        self.lost = 0  # answers served without their line in the log
        self._full = full
        self._refuse = refuse
        self._model = engine.info.name
        self._fingerprint = engine.fingerprint
        self._digest = fingerprint.digest(engine.fingerprint_tree)

    @classmethod
    def from_settings(cls, settings: Settings, engine: Engine) -> Minter:
        """Raises `OSError` when the log's place can't be written and `BadKey` on a bad key."""
        signer = (
            Signer.from_file(settings.receipts_key_file) if settings.receipts_key_file else None
        )
        log = None
        if settings.receipts:
            header = {"fingerprint": engine.fingerprint, "tree": dict(engine.fingerprint_tree)}
            log = ReceiptLog(
                settings.receipts,
                header,
                max_bytes=settings.receipts_max_bytes,
                fsync=settings.receipts_fsync,
            )
        return cls(
            engine,
            log=log,
            signer=signer,
            full=settings.receipts_content == "full",
            refuse=settings.receipts_on_error == "refuse",
        )

    def over(self, engine: Engine, wanted: bool) -> Engine:
        """The engine to ask for one request. Raises `ReceiptLost` before anything is generated, if
        that is known.
        """
        if self.log is None and not wanted:
            return engine
        if self.log is not None and self._refuse and not self.log.recovered():
            raise self._refusal()
        return _MintingEngine(engine, self, wanted)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    async def mint(
        self, prompt: Prompt, sampling: Sampling, request_id: str, answer: Answer
    ) -> dict[str, Any]:
        """The receipt of one finished choice, logged. Raises `ReceiptLost` as the setting says."""
        options = receipts.options_of(sampling)
        receipt: dict[str, Any] = {
            "schema": receipts.SCHEMA,
            "fingerprint": self._fingerprint,
            "fingerprint_sha256": self._digest,
            "model": self._model,
            "request_id": request_id,
            "created": int(time.time()),
            "choice": sampling.choice,
            "seed": sampling.seed,
            "request_sha256": receipts.request_digest(prompt.token_ids, options),
            **receipts.answer_digests(answer.token_ids, answer.logprobs, answer.text),
            "finish_reason": answer.finish_reason,
        }
        if self.signer is not None:
            receipt = self.signer.sign(receipt)
        if self.log is not None:
            await self._append(receipt, prompt, options, answer)
        return receipt

    async def _append(
        self,
        receipt: Mapping[str, Any],
        prompt: Prompt,
        options: Mapping[str, Any],
        answer: Answer,
    ) -> None:
        record: dict[str, Any] = {"receipt": receipt}
        if self._full:
            request = {"prompt_token_ids": prompt.token_ids, "options": options}
            record["request"] = {**request, "prompt": prompt.text}
            record["answer"] = answer.record()
        record["line_sha256"] = receipts.line_digest(record)
        assert self.log is not None
        try:
            # A buffered write takes microseconds and stays on the loop, where lines can't mix; a
            # sync must not.
            if self.log.syncs:
                await asyncio.to_thread(self.log.append, record)
            else:
                self.log.append(record)
        except LogFailed as fault:
            self.lost += 1
            if self._refuse:
                raise self._refusal() from fault
            if self.lost == 1 or self.lost % 1000 == 0:
                _log.error("receipts log: %s; %d answers went out unlogged", fault, self.lost)

    def _refusal(self) -> ReceiptLost:
        why = self.log.failed if self.log else ""
        return ReceiptLost(
            f"the receipts log can't be written ({why}) and receipts_on_error is refuse"
        )


@dataclasses.dataclass(slots=True)
class Answer:
    """One choice as it came out of the engine, gathered. `logprobs` None: the engine sent none for
    some token.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] | None = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def record(self) -> dict[str, Any]:
        """What the log keeps."""
        return {
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }

    def add(self, output: Output) -> None:
        self.token_ids.extend(output.token_ids)
        self.texts.append(output.text)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        if not output.token_ids or self.logprobs is None:
            return
        if output.logprobs is None or len(output.logprobs) != len(output.token_ids):
            self.logprobs = None
            return
        self.logprobs.extend(finite(position.token.logprob) for position in output.logprobs)


class _MintingEngine:
    """An Engine that mints. Everything but `generate` is the engine's own."""

    def __init__(self, engine: Engine, minter: Minter, wanted: bool) -> None:
        self._engine, self._minter, self._wanted = engine, minter, wanted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        request_id: str,
        priority: int = 0,
        whole: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """As the engine's, with a receipt on the last output. Logprobs are asked for, and hidden
        again if only for us.
        """
        if sampling.max_tokens == 0:  # a prompt scored: nothing was answered, nothing to prove
            async with aclosing(
                self._engine.generate(
                    prompt, sampling, request_id=request_id, priority=priority, whole=whole
                )
            ) as scored:
                async for output in scored:
                    yield output
            return
        hidden = sampling.logprobs is None
        asked = dataclasses.replace(sampling, logprobs=0) if hidden else sampling
        answer = Answer()
        source = self._engine.generate(
            prompt, asked, request_id=request_id, priority=priority, whole=whole
        )
        async with aclosing(source) as outputs:
            async for output in outputs:
                answer.add(output)
                receipt = None
                if output.finish_reason in WHOLE:
                    receipt = await self._minter.mint(prompt, sampling, request_id, answer)
                yield _shown(output, hidden, receipt if self._wanted else None)


def _shown(output: Output, hidden: bool, receipt: Mapping[str, Any] | None) -> Output:
    """The output as the handlers see it. Written out: `dataclasses.replace` costs five times as
    much.
    """
    return Output(
        output.text,
        output.token_ids,
        None if hidden else output.logprobs,
        output.prompt_logprobs,
        output.finish_reason,
        output.stop_reason,
        output.num_cached_tokens,
        receipt,
    )
