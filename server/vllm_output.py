"""Our options into vLLM's SamplingParams, vLLM's outputs into ours. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from server.engine import Output, Position, Sampling, TokenLogprob
from server.vllm_text import TokenText


def sampling_params(sampling: Sampling, *, whole: bool = False, plain: bool = False) -> Any:
    """vLLM's SamplingParams for one choice; `whole`: one output, when it is done.

    The seed travels in `extra_args`, where our draw reads it; vLLM's own `seed` stays None, so
    that it makes no generator. `plain`: for vLLM's own sampler (determinism is off), whose seed of
    choice i is seed + i. Scoring a prompt (`max_tokens` 0) asks for one token, which
    `Translator` drops.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    own = {"seed": sampling.seed, "choice": sampling.choice, "offset": sampling.position_offset}
    allowed = sampling.allowed_token_ids
    return SamplingParams(
        max_tokens=max(1, sampling.max_tokens),
        min_tokens=min(sampling.min_tokens, max(1, sampling.max_tokens)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=None if allowed is None else list(allowed),
        bad_words=list(sampling.bad_words),
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        structured_outputs=structured_params(sampling.structured),
        extra_args=None if plain else {"samebits": own},
        seed=sampling.seed + sampling.choice if plain else None,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA,
    )


def structured_params(wanted: tuple[str, str] | None) -> Any:
    """vLLM's StructuredOutputsParams for (kind, text)."""
    from vllm.sampling_params import StructuredOutputsParams

    if wanted is None:
        return None
    kind, text = wanted
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(**{kind: json.loads(text) if kind == "choice" else text})


class Translator:
    """Turns the stream of vLLM's RequestOutputs of one choice into Outputs."""

    def __init__(self, text: TokenText, sampling: Sampling) -> None:
        self._text = text
        self._sampling = sampling
        self._first = True

    def output(self, found: Any) -> Output:
        """One RequestOutput (a delta) as an Output."""
        choice = found.outputs[0]
        prompt = self._prompt(found) if self._first else None
        self._first = False
        cached = found.num_cached_tokens or 0
        if self._sampling.max_tokens == 0:
            return Output(prompt_logprobs=prompt, finish_reason="length", num_cached_tokens=cached)
        ids = tuple(choice.token_ids)
        return Output(
            text=choice.text,
            token_ids=ids,
            logprobs=self._logprobs(choice, ids),
            prompt_logprobs=prompt,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            num_cached_tokens=cached,
        )

    def _logprobs(self, choice: Any, ids: tuple[int, ...]) -> tuple[Position, ...] | None:
        wanted = self._sampling.logprobs
        if wanted is None:
            return None
        # A delta carries the new positions; a longer list, all so far.
        rows = list(choice.logprobs or [])[-len(ids) :] if ids else []
        return tuple(self._position(i, row, wanted) for i, row in zip(ids, rows, strict=True))

    def _prompt(self, found: Any) -> tuple[Position | None, ...] | None:
        wanted = self._sampling.prompt_logprobs
        if wanted is None:
            return None
        rows = found.prompt_logprobs or []
        return tuple(
            None if row is None else self._position(i, row, wanted)
            for i, row in zip(found.prompt_token_ids, rows, strict=False)
        )

    def _position(self, token_id: int, row: Mapping[int, Any], wanted: int) -> Position:
        ranked = sorted(row.items(), key=lambda item: (item[1].rank or 1, item[0]))
        top = [self._token(i, p) for i, p in ranked if wanted == -1 or (p.rank or 1) <= wanted]
        count = len(top) if wanted == -1 else wanted
        return Position(self._token(token_id, row[token_id]), tuple(top[:count]))

    def _token(self, token_id: int, found: Any) -> TokenLogprob:
        return TokenLogprob(
            int(token_id), float(found.logprob), int(found.rank or 1), self._text.text(token_id)
        )
