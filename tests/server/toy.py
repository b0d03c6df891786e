"""A whole language model in twenty lines, and a server around it: a pure function of the request,
no torch.

`flaw` plants a fault: "batch" makes answers depend on how many are running, "seed" ignores the
seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from server import fingerprint
from server.engine import (
    Health,
    ModelInfo,
    Output,
    Position,
    Prompt,
    Sampling,
    TokenLogprob,
)
from server.errors import ServerError
from server.minting import Minter

VOCABULARY = 997


def tree(**changes: Any) -> dict[str, Any]:
    """A small fingerprint tree."""
    return fingerprint.build_tree(
        {"weights": {"model.safetensors": changes.get("weights", "0" * 64)}, "config": "1" * 64},
        engine={"dtype": changes.get("dtype", "bfloat16"), "tensor_parallel_size": 1},
        ops={"table": [{"op": "aten::mm", "kernel": changes.get("kernel", "ours"), "tiles": {}}]},
        device={"kind": "cpu", "model": "toy"},
        forced={},
        sampler="toy/1",
        versions={"vllm": "0.23.0"},
        ops_code="2" * 64,
    )


class ToyEngine:
    """Implements `server.engine.Engine` as far as receipts need it."""

    def __init__(self, *, flaw: str = "", pause_s: float = 0.0, **changes: Any) -> None:
        self.fingerprint_tree: Mapping[str, Any] = tree(**changes)
        self.fingerprint = fingerprint.short(self.fingerprint_tree)
        self.info = ModelInfo("toy", (), 4096, VOCABULARY, 0)
        self.flaw, self.pause_s = flaw, pause_s
        self.running = self.asked = self.closed = 0

    def health(self) -> Health:
        return Health(alive=True, ready=True, num_running=self.running)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        request_id: str,
        priority: int = 0,
        whole: bool = False,
    ) -> AsyncIterator[Output]:
        self.running += 1
        self.asked += 1
        try:
            for t in range(sampling.max_tokens):
                await asyncio.sleep(self.pause_s)
                yield self._step(prompt, sampling, t)
        finally:
            self.running -= 1
            self.closed += 1

    def _step(self, prompt: Prompt, sampling: Sampling, t: int) -> Output:
        seed = 0 if self.flaw == "seed" else sampling.seed
        what = (prompt.token_ids, seed, sampling.choice, sampling.temperature, t)
        if self.flaw == "batch" and t > 3 and self.running > 1:
            what = (*what, self.running)
        raw = hashlib.sha256(repr(what).encode()).digest()
        token_id = int.from_bytes(raw[:4], "big") % VOCABULARY
        logprob = struct.unpack(">f", b"\xbf" + raw[4:7])[0]  # a float32 in (-2, -0.5]
        token = TokenLogprob(token_id, logprob, 1, f" w{token_id}")
        last = t + 1 == sampling.max_tokens
        return Output(
            text=token.text,
            token_ids=(token_id,),
            logprobs=None if sampling.logprobs is None else (Position(token, ()),),
            finish_reason="length" if last else None,
        )


def app(engine: ToyEngine, minter: Minter | None = None, *, ids: bool = True) -> Starlette:
    """`/v1/completions` (token ids in, plain answers out), `/v1/models`, `/version`,
    `/fingerprint`.
    """

    async def complete(request: Request) -> JSONResponse:
        body = await request.json()
        if not ids and "return_token_ids" in body:
            return JSONResponse({"error": {"message": "unknown field"}}, 400)
        try:
            source = minter.over(engine, bool(body.get("samebits_receipt"))) if minter else engine
            choices = [await _choice(source, body, i) for i in range(body.get("n", 1))]
        except ServerError as fault:
            return JSONResponse(fault.body(), fault.status)
        return JSONResponse(
            {
                "choices": [c for c, _ in choices],
                "system_fingerprint": engine.fingerprint if ids else "fp_other",
                "receipts": [r for _, r in choices],
            }
        )

    async def _choice(source: Any, body: dict[str, Any], index: int) -> tuple[Any, Any]:
        sampling = Sampling(
            body["max_tokens"],
            temperature=body.get("temperature", 1.0),
            seed=body.get("seed", 0),
            choice=index + body.get("samebits_choice", 0),
            logprobs=body.get("logprobs"),
        )
        outputs = [
            o
            async for o in source.generate(Prompt(tuple(body["prompt"])), sampling, request_id="x")
        ]
        choice = {
            "index": index,
            "text": "".join(o.text for o in outputs),
            "finish_reason": outputs[-1].finish_reason,
            "logprobs": {
                "token_logprobs": [p.token.logprob for o in outputs for p in o.logprobs or ()],
                "tokens": [p.token.text for o in outputs for p in o.logprobs or ()],
            },
        }
        if ids:
            choice["token_ids"] = [i for o in outputs for i in o.token_ids]
        return choice, outputs[-1].receipt

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": engine.info.name}]})

    async def version(_: Request) -> JSONResponse:
        shown = {"system_fingerprint": engine.fingerprint, "fingerprint": engine.fingerprint_tree}
        return JSONResponse(shown if ids else {"version": "1"})

    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
        Route("/version", version),
    ]
    return Starlette(routes=routes)


@contextlib.contextmanager
def serving(application: Any, lifespan: Any = "off", port: int = 0) -> Iterator[str]:
    """The application on a real socket, in a thread; yields its base URL."""
    server = uvicorn.Server(
        uvicorn.Config(application, port=port, log_level="error", lifespan=lifespan)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
