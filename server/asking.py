"""Asking a recorded request again, of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.comparison import Reply, read_reply

# Option of a receipt -> what a request that doesn't set it means. These are left out, for servers
# that lack them.
NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "allowed_token_ids": None,
    "bad_words": [],
    "stop": [],
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
# What a server of ours adds to them. An option that stands in neither is of a later version.
ASKED = {"max_tokens", "temperature", "seed", "choice", "position_offset", "logit_bias"}
ASKED |= {"structured", *NEUTRAL}
BUSY = frozenset({408, 429, 500, 502, 503, 504})
FAILURES = 3  # HTTP 500 so often in a row is an answer, not a pause


class Unreachable(Exception):
    """The server did not answer within the patience given. The message says what was seen last."""


class CantAsk(Exception):
    """The record's digests hold, but it is no request that this version can ask."""


class Refused(Exception):
    """The server answered, and not with an answer: status and message."""


@dataclass
class Server:
    """One server: its address, its models, and what it turned out to understand."""

    root: str
    models: tuple[str, ...] = ()
    is_samebits: bool = False
    fingerprint: str | None = None
    tree: Mapping[str, Any] | None = None
    returns_ids: bool = True
    headers: dict[str, str] = field(default_factory=dict)


def root_of(base_url: str) -> str:
    """The server's root from what people call its base URL, with or without `/v1`."""
    root = base_url.rstrip("/").removesuffix("/v1")
    return root if "://" in root else f"http://{root}"


class Asker:
    """Asks with bounded patience. Use as an async context manager; many tasks may share it."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        concurrency: int = 32,
        timeout_s: float = 600.0,
        patience_s: float = 60.0,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.server = Server(root_of(base_url), headers=headers)
        self._patience_s = patience_s
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(timeout_s, connect=10.0), limits=limits
        )

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def meet(self) -> Server:
        """Learn who answers. Raises `Unreachable` or `Refused`."""
        models = await self._call("GET", "/v1/models")
        entries = models.get("data")
        entries = entries if isinstance(entries, list) else []
        self.server.models = tuple(str(e.get("id")) for e in entries if isinstance(e, dict))
        try:
            version = await self._call("GET", "/version")
        except Refused:
            version = {}
        found = version.get("system_fingerprint")
        if isinstance(found, str) and found.startswith("sb1-"):
            self.server.is_samebits, self.server.fingerprint = True, found
            tree = version.get("fingerprint")
            self.server.tree = tree if isinstance(tree, dict) else None
        return self.server

    async def ask(self, record: Mapping[str, Any], model: str) -> Reply:
        """The recorded request once more. Raises `CantAsk`, `Unreachable` or `Refused`."""
        choice: int = record["receipt"]["choice"]
        try:
            body = self.body(record, model)
            json.dumps(body, allow_nan=False)
        except (KeyError, TypeError, ValueError, RecursionError) as fault:
            raise CantAsk(f"no request to ask again ({type(fault).__name__}: {fault})") from None
        try:
            answer = await self._call("POST", "/v1/completions", body)
        except Refused:
            # An answer with ids is what is wanted; a strict server that doesn't know the field gets
            # it without.
            if self.server.is_samebits or not body.pop("return_token_ids", False):
                raise
            self.server.returns_ids = False
            answer = await self._call("POST", "/v1/completions", body)
        try:
            reply = read_reply(answer, 0 if self.server.is_samebits else choice)
        except ValueError as fault:
            raise Refused(str(fault)) from None
        if reply.request_sha256 not in (None, record["receipt"]["request_sha256"]):
            raise Refused("the server's receipt is of another request than the recorded one")
        return reply

    def body(self, record: Mapping[str, Any], model: str) -> dict[str, Any]:
        """The body of `/v1/completions` that means the recorded request."""
        options = record["request"]["options"]
        if unknown := sorted(set(options) - ASKED):
            raise CantAsk(f"the option {unknown[0]!r} is not known to this version")
        body: dict[str, Any] = {
            "model": model,
            "prompt": record["request"]["prompt_token_ids"],
            "max_tokens": options["max_tokens"],
            "temperature": options["temperature"],
            "seed": options["seed"],
            "logprobs": 0,
        }
        for name, neutral in NEUTRAL.items():
            if options.get(name, neutral) != neutral:
                body[name] = options[name]
        if options.get("logit_bias"):
            body["logit_bias"] = {str(i): bias for i, bias in options["logit_bias"]}
        if options.get("structured"):
            body["structured_outputs"] = _structured(*options["structured"])
        if options.get("position_offset"):
            body["samebits_position_offset"] = options["position_offset"]
        choice = options.get("choice", 0)
        if choice and self.server.is_samebits:
            body["samebits_choice"] = choice
        elif choice:
            body["n"] = choice + 1
        if self.server.returns_ids:
            body["return_token_ids"] = True
        if self.server.is_samebits:
            body["samebits_receipt"] = True  # it says which request it understood
        return body

    async def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One call, tried again while the server is busy or away, up to the patience given."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        pause_s, failures = 0.2, 0
        while True:
            last, retry_after_s = await self._once(method, path, body)
            if isinstance(last, dict):
                return last
            failures = failures + 1 if last.startswith("HTTP 500") else 0
            if failures == FAILURES:
                raise Refused(f"{last}, {failures} times")
            if loop.time() + pause_s > deadline:
                raise Unreachable(f"{self.server.root}: {last}")
            await asyncio.sleep(max(pause_s, min(retry_after_s, 10.0)))
            pause_s = min(2 * pause_s, 5.0)

    async def _once(self, method: str, path: str, body: Any) -> tuple[dict[str, Any] | str, float]:
        """(the answer, 0), or (why to try again, seconds to wait). Raises `Refused`."""
        try:
            response = await self._http.request(method, self.server.root + path, json=body)
        except httpx.TransportError as fault:
            return (f"{type(fault).__name__}: {fault}".rstrip(": "), 0.0)
        except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as fault:
            raise Refused(f"{type(fault).__name__}: {fault}") from None
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            answer = None
        if response.status_code in BUSY:
            wait = response.headers.get("retry-after", "0")
            said = f"HTTP {response.status_code}: {_message(answer)}"
            return (said, float(wait) if wait.isascii() and wait.isdigit() else 0.0)
        if response.status_code != 200:
            raise Refused(f"HTTP {response.status_code}: {_message(answer)}")
        if not isinstance(answer, dict):
            raise Refused("HTTP 200 without a JSON object")
        return (answer, 0.0)


def _structured(kind: str, text: str) -> dict[str, Any]:
    if kind == "json_object":
        return {"json_object": True}
    return {kind: json.loads(text) if kind in ("json", "choice") else text}


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message)[:300] if message else "no message"
