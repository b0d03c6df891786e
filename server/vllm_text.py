"""What single tokens look like: their bytes, whatever kind of tokenizer they come from."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any


def _byte_of_char() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary (GPT-2's published table).

    Printable Latin-1 stands for itself; the other 68 bytes, in order, for U+0100 and up.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    return {chr(b): b for b in shown} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


class TokenText:
    """Spells tokens. `tokenizer` is a Hugging Face one; slow and exotic ones are asked to
    decode.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(int(i) for i in tokenizer.all_special_ids)
        self._added = {
            int(i): str(t) for i, t in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }
        self._cache: dict[int, str] = {}
        self.kind = self._kind()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` skips."""
        return self._special

    @cached_property
    def _bytes(self) -> dict[str, int]:
        return _byte_of_char()

    def _kind(self) -> str:
        """ "bytes" (byte-level BPE), "pieces" (SentencePiece with byte fallback) or "other"."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return "other"
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder") or {}) if backend else ""
        if '"ByteLevel"' in decoder:
            return "bytes"
        if '"ByteFallback"' in decoder or '"Metaspace"' in decoder:
            return "pieces"
        return "other"

    def raw(self, token_id: int) -> bytes:
        """The token's bytes as they stand in a text after other tokens."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self.kind == "bytes":
            return bytes(self._bytes[c] for c in piece if c in self._bytes)
        if self.kind == "pieces":
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return str(piece).replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token_id])).encode()

    def text(self, token_id: int) -> str:
        """The token's text, or `bytes:\\xNN…` where it is a part of a character."""
        found = self._cache.get(token_id)
        if found is None:
            raw = self.raw(token_id)
            try:
                found = raw.decode()
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
            self._cache[token_id] = found
        return found
