"""What an answer says about itself beside its choices: token counts, the seed in use, receipts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from server.answers import Answer
from server.errors import InvalidRequest
from server.protocol import SamplingFields
from server.seeds import Seed

RECEIPT_HEADER = "x-samebits-receipt"


class Usage:
    """Counts of one request. A prompt counts once, however many choices it has."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens

    def body(self, answers: Sequence[Answer]) -> dict[str, int]:
        """OpenAI's `usage`, for what has been generated so far."""
        generated = sum(answer.num_tokens for answer in answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        }

    def samebits(self, seed: Seed, answers: Sequence[Answer], receipt: bool) -> dict[str, Any]:
        """Our extension object: the seed, and one receipt per choice where they were asked for."""
        shown = seed.shown()
        if receipt:
            shown["receipts"] = [answer.receipt for answer in answers]
        return shown


def wants_receipt(request: Request, body: SamplingFields) -> bool:
    """Whether this answer is to carry receipts: header `X-Samebits-Receipt: 1`, or the body
    field. Raises `InvalidRequest` on another value: it would go without a receipt unnoticed.
    """
    given = {value.strip() for value in request.headers.getlist(RECEIPT_HEADER)}
    if not given <= {"0", "1"} or len(given) > 1:
        raise InvalidRequest("X-Samebits-Receipt: should be 1 or 0", param="X-Samebits-Receipt")
    return body.samebits_receipt or given == {"1"}
