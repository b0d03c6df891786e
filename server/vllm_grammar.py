"""Grammars of structured answers, tried before the engine sees them.

vLLM only parses a grammar at the door. It compiles it in the engine, beside the steps, and a
compiler that refuses there ends the engine. So the same compiler has its say here first.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAX_KNOWN = 4096
MAX_CHARS = 200  # of a compiler's words; they may quote the grammar
_SOURCE = re.compile(r"\[[0-9:]+\] \S+:\d+: ")  # where in its own code a compiler stood


class Grammars:
    """Verdicts on grammars, by the backend that the engine uses; made at the first one."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._backend: Any = None
        self._known: dict[bytes, str] = {}
        self._pool = ThreadPoolExecutor(1, "grammar")  # one at a time, never on the event loop

    async def fault(self, kind: str, text: str) -> str:
        """Why the engine can't follow this grammar; "" when it can."""
        if self._config.structured_outputs_config.backend != "xgrammar":
            return ""  # determinism is off: vLLM chooses
        key = hashlib.sha256(f"{kind}\0{text}".encode("utf-8", "surrogatepass")).digest()
        found = self._known.get(key)
        if found is None:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._pool, self._judge, kind, text)
            if len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[key] = found
        return found

    def _judge(self, kind: str, text: str) -> str:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.structured_output import backend_xgrammar
        from vllm.v1.structured_output.request import get_structured_output_key

        from server.vllm_output import structured_params

        params = SamplingParams(structured_outputs=structured_params((kind, text)))
        try:
            backend_xgrammar.validate_xgrammar_grammar(params)
            if self._backend is None:
                vocabulary = self._config.model_config.get_vocab_size()
                self._backend = backend_xgrammar.XgrammarBackend(
                    self._config, tokenizer=self._tokenizer, vocab_size=vocabulary
                )
            grammar = self._backend.compile_grammar(
                *get_structured_output_key(params.structured_outputs)
            )
            mask = self._backend.allocate_token_bitmask(1)
            grammar.fill_bitmask(mask, 0)
            self._backend.compiler.clear_cache()
        except Exception as fault:  # compilers raise whatever they like
            said = _SOURCE.sub("", " ".join(str(fault).split()))
            return said[:MAX_CHARS] or type(fault).__name__
        return "" if bool(mask.any()) else "no text can satisfy it"
