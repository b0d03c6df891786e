"""Puts the draw in the place of vLLM's sampler: reads each row's seed, choice and position, and
hands back tokens.

vLLM is imported inside functions only; importing this module does nothing.

Where the numbers come from:
* seed, choice and offset: `SamplingParams.extra_args["samebits"]`, which our server sets on every
  request. For other users of the engine `complete` fills it in when the request enters: from
  `SamplingParams.seed` (choice = index within n), or from the system's randomness when there is
  no seed. It runs once a request in the front-end process, so that every rank sees the same seed.
* position: how many answer tokens the row's request already has, plus the offset. It is counted
  from the request's own list, which vLLM keeps right under chunked prefill, preemption and
  asynchronous scheduling (there the list holds placeholders, and only its length matters here).

No torch.Generator is made for a request: there is no `SamplingParams.seed` left when vLLM looks.
"""

from __future__ import annotations

import functools
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ops import sampling, sampling_logits, sampling_logprobs
from ops.registry import OpsError, Override

SEED_RANGE = (-(2**63), 2**63 - 1)
_KEY = "samebits"
_MAX_ASSIGNED = 65536

_assigned: OrderedDict[str, int] = OrderedDict()


def assigned_seed(request_id: str) -> int | None:
    """The seed that was drawn for an unseeded request of this process (the last 65,536 are kept);
    None if it had one.
    """
    return _assigned.get(request_id)


def stream(params: Any) -> tuple[int, int, int] | None:
    """(seed, choice, offset) of a request's SamplingParams; None when it says nothing.

    Raises `ValueError`.
    """
    own = (params.extra_args or {}).get(_KEY)
    if own is None:
        own = {"seed": params.seed} if params.seed is not None else None
    if own is None:
        return None
    if not isinstance(own, Mapping) or not set(own) <= {"seed", "choice", "offset"}:
        raise ValueError(f'extra_args["{_KEY}"] takes seed, choice and offset, and got {own!r}')
    seed, choice, offset = own.get("seed"), own.get("choice", 0), own.get("offset", 0)
    return (
        _integer("seed", seed, *SEED_RANGE),
        _integer("choice", choice, 0, 2**31 - 1),
        _integer("offset", offset, 0, 2**31 - 1),
    )


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, and is {value!r}")
    return value


def complete(params: Any, request_id: str) -> None:
    """Give a request that enters the engine its (seed, choice, offset), in place, and take `seed`
    away from vLLM.
    """
    found = stream(params)
    if found is None:
        seed = secrets.randbits(64) - 2**63
        if params.temperature >= sampling.MIN_TEMPERATURE:
            _assigned[request_id] = seed
            while len(_assigned) > _MAX_ASSIGNED:
                _assigned.popitem(last=False)
        found = seed, 0, 0
    seed, choice, offset = found
    params.extra_args = {
        **(params.extra_args or {}),
        _KEY: {"seed": seed, "choice": choice, "offset": offset},
    }
    params.seed = None


class Sampler(torch.nn.Module):
    """Stands where vLLM's sampler stood in a model runner. Holds nothing between calls.

    `compute_logprobs` and `gather_logprobs` are also what the runner calls for prompt logprobs.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        if stock.logprobs_mode != "raw_logprobs":
            raise OpsError(
                f"vllm.Sampler: logprobs_mode {stock.logprobs_mode!r}: only raw_logprobs is served"
            )
        self.logprobs_mode = stock.logprobs_mode
        self.rehearsing = False

    compute_logprobs = staticmethod(sampling_logprobs.log_softmax)

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        """vLLM's LogprobsTensors for [N, V]: the given token first, then the `num_logprobs` most
        likely.
        """
        from vllm.v1.outputs import LogprobsTensors

        return LogprobsTensors(*sampling_logprobs.gather(logprobs, num_logprobs, token_ids))

    def forward(self, logits: torch.Tensor, **_: Any) -> Any:
        """vLLM's rehearsal, which has no requests: a draw of the same size.

        Raises `OpsError` on anything else.
        """
        from vllm.v1.outputs import SamplerOutput

        if not self.rehearsing:
            raise OpsError(
                "vllm.Sampler: called without its rows; speculative decoding is not served"
            )
        n = logits.shape[0]
        if logits.device.type == "cuda":
            from ops.kernels.triton import draw

            token = draw.rehearse(logits)
            sampling_logprobs.of_logits(logits, 0, token)
        else:
            token = sampling.draw(
                logits.float(), [1.0] * n, [50] * n, [0.9] * n, [0.0] * n, [0] * n, [0] * n, [0] * n
            )
        return SamplerOutput(token.to(torch.int32).unsqueeze(-1), None)


def sample(runner: Any, logits: torch.Tensor, spec_decode_metadata: Any = None) -> Any:
    """One step of a model runner: logits [N, V], a row per request of its batch -> vLLM's
    SamplerOutput.

    Raises `OpsError` on speculative decoding and on custom logits processors: neither has been
    proven.
    """
    from vllm.v1.outputs import SamplerOutput

    if spec_decode_metadata is not None:
        raise OpsError("vllm.Sampler: speculative decoding is not served")
    batch = runner.input_batch
    batch.update_async_output_token_ids()
    _refuse_custom(batch)
    requests = [runner.requests[name] for name in batch.req_ids]
    logits = logits[: len(requests)]
    raw = batch.__dict__.pop("_samebits_raw", logits)
    held = [_held(r) for r in requests]
    said = [len(r.output_token_ids) for r in requests]
    x = logits  # the draw reads any float type: a second, wider copy only where it is written to
    if any(h.edited or n < h.silent for h, n in zip(held, said, strict=True)):
        x = sampling_logits.apply(logits.to(torch.float32, copy=True), [edits(r) for r in requests])
    if batch.sampling_metadata.thinking_budget_state_holder is not None:
        x = _think(batch, logits.to(torch.float32, copy=True) if x is logits else x)
    token = sampling.draw_with(x, prepared(runner, requests))
    return SamplerOutput(token.to(torch.int32).unsqueeze(-1), _gathered(batch, raw, token))


def index(rows: list[int], device: torch.device) -> torch.Tensor:
    """Row numbers on the device, copied without waiting for what it is busy with."""
    pinned = torch.tensor(rows, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _gathered(batch: Any, raw: torch.Tensor, token: torch.Tensor) -> Any:
    """vLLM's LogprobsTensors for the batch, of the logits as they were before any edit: each row
    gets the tokens that it asked for, whether by number or by name; zeros pad it, and fill the rows
    that didn't ask."""
    from vllm.v1.outputs import LogprobsTensors

    asked = batch.num_logprobs.keys() | batch.logprob_token_ids.keys()
    if not asked:
        return None
    rows = [i for i, name in enumerate(batch.req_ids) if name in asked]
    if not rows:
        return None
    if len(rows) == token.shape[0] and not batch.logprob_token_ids:
        # The common case, without a copy from the host: none waits for the forward pass.
        return LogprobsTensors(*sampling_logprobs.of_logits(raw, batch.max_num_logprobs, token))
    names = {batch.req_id_to_index[r]: list(t) for r, t in batch.logprob_token_ids.items()}
    width = max([batch.max_num_logprobs or 0, *(len(t) for t in names.values())]) + 1
    ids = torch.zeros((token.shape[0], width), dtype=torch.int32, device=token.device)
    values = torch.zeros(ids.shape, dtype=torch.float32, device=token.device)
    ranks = torch.zeros(token.shape[0], dtype=torch.int64, device=token.device)
    for by_name in (False, True):
        part = [row for row in rows if (row in names) == by_name]
        if not part:
            continue
        at = index(part, token.device)
        if by_name:
            lists = {n: names[row] for n, row in enumerate(part)}
            found = sampling_logprobs.named(
                sampling_logprobs.log_softmax(raw[at]), lists, token[at]
            )
        else:
            found = sampling_logprobs.of_logits(raw[at], batch.max_num_logprobs, token[at])
        wide = found[0].shape[1]
        ids[at, :wide], values[at, :wide], ranks[at] = found
    return LogprobsTensors(ids, values, ranks)


def _refuse_custom(batch: Any) -> None:
    from vllm.v1.sample.logits_processor import builtin

    known = (
        builtin.MinTokensLogitsProcessor,
        builtin.LogitBiasLogitsProcessor,
        builtin.MinPLogitsProcessor,
    )
    for processor in batch.logitsprocs.all:
        if not isinstance(processor, known):
            raise OpsError(
                f"vllm.Sampler: logits processor {type(processor).__name__} is not served"
            )


def _think(batch: Any, logits: torch.Tensor) -> torch.Tensor:
    """vLLM's thinking budget, which acts on the rows that asked for one."""
    holder = batch.sampling_metadata.thinking_budget_state_holder
    if holder is None or not holder.has_tracked_requests():
        return logits
    meta = batch.sampling_metadata
    holder.update_state(meta.output_token_ids, meta.spec_token_ids, repeat_indices=None)
    out: torch.Tensor = holder.apply_to_logits(logits, False, meta.spec_token_ids)
    return out


@dataclass(frozen=True, slots=True)
class _Held:
    """What a request's SamplingParams say, read once; `params` shows whether it is still them."""

    params: Any
    draw: tuple[
        float, int, float, float, int, int
    ]  # temperature, top_k, top_p, min_p, seed, choice
    offset: int
    edited: bool  # whether anything but min_tokens can change its logits
    early: sampling_logits.Edits  # what min_tokens does while it does
    silent: int  # until how many answer tokens that is


def _held(request: Any) -> _Held:
    p = request.sampling_params
    held: _Held | None = getattr(request, "_samebits", None)
    if held is None or held.params is not p:
        found = stream(p)
        if found is None:
            raise OpsError(
                f"vllm.Sampler: request {request.req_id} reached the draw without a seed"
            )
        seed, choice, offset = found
        edited = (
            p.repetition_penalty != 1.0
            or p.frequency_penalty != 0
            or p.presence_penalty != 0
            or bool(p.allowed_token_ids or p.bad_words_token_ids or p.logit_bias)
        )
        draw = (p.temperature, p.top_k, p.top_p, p.min_p, seed, choice)
        early = sampling_logits.Edits(banned=sorted(p.all_stop_token_ids))
        silent = p.min_tokens if p.all_stop_token_ids else 0
        held = request._samebits = _Held(p, draw, offset, edited, early, silent)
    return held


def prepared(runner: Any, requests: Sequence[Any]) -> sampling.Rows:
    """The rows' options, from each request's own SamplingParams: made anew only when the batch has
    other rows than in the last step; the positions are always new. Raises `OpsError` on a request
    without a seed.
    """
    held = [_held(r) for r in requests]
    now = [len(r.output_token_ids) + h.offset for r, h in zip(requests, held, strict=True)]
    kept = runner.__dict__.get("_samebits_prepared")
    if kept is None or kept[0] != held:
        columns = zip(*(h.draw for h in held), strict=True)
        prepared = sampling.rows(*columns, positions=now)  # type: ignore[misc]
        runner._samebits_prepared = (held, prepared)
        return prepared
    own: sampling.Rows = kept[1]
    return own.at(np.array(now, dtype=np.int64))


def edits(request: Any) -> sampling_logits.Edits:
    """What a request's options do to its logits now.

    With an offset the last `offset` tokens of the prompt are the answer's beginning: penalties and
    bad words count them as answer. min_tokens counts this request's own tokens, as vLLM's scheduler
    does.
    """
    p, held = request.sampling_params, _held(request)
    early = len(request.output_token_ids) < held.silent
    if not held.edited:  # the common case, and it must not copy prompts in every step
        return held.early if early else _NO_EDITS
    prompt = request.prompt_token_ids or []
    split = len(prompt) - min(held.offset, len(prompt))
    answer = [*prompt[split:], *request.output_token_ids]
    banned = sampling_logits.bad_word_ends(p.bad_words_token_ids or [], answer)
    if early:
        banned.extend(p.all_stop_token_ids)
    return sampling_logits.Edits(
        allowed=p.allowed_token_ids or None,
        banned=banned,
        bias=tuple((int(t), b) for t, b in (p.logit_bias or {}).items()),
        repetition=p.repetition_penalty,
        frequency=p.frequency_penalty,
        presence=p.presence_penalty,
        prompt=prompt[:split],
        answer=answer,
    )


_NO_EDITS = sampling_logits.Edits()


def bind(runner_class: type) -> None:
    """Make a model runner class draw here: `_sample`, the sampler object, the rehearsal.

    Idempotent.
    """
    if getattr(runner_class._sample, "_samebits", False):  # type: ignore[attr-defined]
        return
    start, rehearse = runner_class.__init__, runner_class._dummy_sampler_run  # type: ignore

    @functools.wraps(start)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if hasattr(self, "sampler") and not isinstance(self.sampler, Sampler):
            self.sampler = Sampler(self.sampler)

    def _sample(self: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        return sample(self, logits, spec_decode_metadata)

    @functools.wraps(rehearse)
    def _dummy_sampler_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.sampler.rehearsing = True
        try:
            return rehearse(self, *args, **kwargs)
        finally:
            self.sampler.rehearsing = False

    _sample._samebits = True  # type: ignore[attr-defined]
    runner_class.__init__ = __init__  # type: ignore[misc]
    runner_class._sample = _sample  # type: ignore[attr-defined]
    runner_class._dummy_sampler_run = _dummy_sampler_run  # type: ignore[attr-defined]


def _bind_grammar(module: Any) -> None:
    """Keep the model's own logits when a grammar is about to overwrite them and logprobs were
    asked for.
    """
    stock = module.apply_grammar_bitmask
    if getattr(stock, "_samebits", False):
        return

    @functools.wraps(stock)
    def apply_grammar_bitmask(
        scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: torch.Tensor
    ) -> None:
        if input_batch.max_num_logprobs is not None or input_batch.logprob_token_ids:
            input_batch._samebits_raw = logits.clone()
        stock(scheduler_output, grammar_output, input_batch, logits)

    apply_grammar_bitmask._samebits = True  # type: ignore[attr-defined]
    module.apply_grammar_bitmask = apply_grammar_bitmask


def _bind_front() -> None:
    """Seeds at the entrance, choices for n > 1, and temperatures as given.

    These run in the front-end process.
    """
    from vllm import sampling_params
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    sampling_params._MAX_TEMP = 0.0  # vLLM lifts 0 < temperature < _MAX_TEMP to it
    if getattr(InputProcessor.process_inputs, "_samebits", False):
        return
    process = InputProcessor.process_inputs

    @functools.wraps(process)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *a: Any, **k: Any
    ) -> Any:
        if isinstance(params, sampling_params.SamplingParams):
            stream(params)
        request = process(self, request_id, prompt, params, *a, **k)
        if request.sampling_params is not None:
            if getattr(self, "use_v2_model_runner", False):
                from ops.sampling_runner2 import fits

                fits(request.sampling_params)
            complete(request.sampling_params, request_id)
        return request

    def _get_child_sampling_params(self: Any, index: int) -> Any:
        child = self.sampling_params.clone()
        child.n = 1
        own = child.extra_args[_KEY]
        child.extra_args = {**child.extra_args, _KEY: {**own, "choice": own["choice"] + index}}
        return child

    process_inputs._samebits = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs
    ParentRequest._get_child_sampling_params = _get_child_sampling_params


def install() -> None:
    """Bind in this process. Raises `OpsError` when this vLLM has no such places."""
    try:
        from vllm.v1.structured_output import utils
        from vllm.v1.worker import gpu_model_runner

        _bind_front()
        _bind_grammar(utils)
        _bind_grammar(gpu_model_runner)
        bind(gpu_model_runner.GPUModelRunner)
    except (ImportError, AttributeError) as fault:
        raise OpsError(f"vllm.Sampler: this vLLM has another shape: {fault}") from fault


def install_both() -> None:
    """`install`, and into the second model runner, which CUDA has."""
    from ops import sampling_runner2

    install()
    sampling_runner2.install()


def both_installed() -> bool:
    """Whether the draw is what runs in either runner."""
    from ops import sampling_runner2

    return installed() and sampling_runner2.installed()


def installed() -> bool:
    """Whether the draw is what runs: looks at the bound functions and at what vLLM does to a
    small temperature.
    """
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return (
        getattr(GPUModelRunner._sample, "_samebits", False)
        and getattr(InputProcessor.process_inputs, "_samebits", False)
        and SamplingParams(temperature=0.001).temperature == 0.001
    )


def check() -> None:
    """The device's form of the draw against the definition, alone and in batches.

    Raises `NotInvariant`.
    """
    from ops import device, sampling_check

    sampling_check.check(device.detect().kind)


OVERRIDE = Override(
    op="vllm.Sampler",
    kernel=sampling.SAMPLER,
    reason="vLLM's draws depend on the neighbours; its generators break on chunked prompts",
    install=install,
    installed=installed,
    check=check,
    tiles={"sampler": sampling.SAMPLER},
)
