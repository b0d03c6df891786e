"""The draw in vLLM's second model runner, which dense Llama, Mistral and Qwen3 models take on CUDA.

That runner keeps what a request asked for in tables on the device, by the request's slot, and
knows the answer so far only there. So does this sampler: a request's numbers are written once,
when it enters (and again when it comes back after a preemption), and a step costs no work per row
on the host. The place in the answer is computed from the position of the row's last token, which
the runner keeps right under chunked prefill, preemption and asynchronous scheduling.

vLLM's own tables for logit_bias, allowed tokens, bad words and penalties stay in use, with these
corrections: the answer begins where the position offset says; min_tokens bans one token less (the
second runner's condition is off by one); and what the tables say is done by ops/kernels/triton/
edits.py, since vLLM's kernel for allowed tokens is a race, and its penalties round otherwise.

vLLM is imported inside functions only; importing this module does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ops import sampling, sampling_hook, sampling_logprobs
from ops.registry import OpsError

#: What the second runner's tables hold for one request: SamplingParams' field -> how many.
ROOM = {
    "allowed_token_ids": 1024, "logit_bias": 1024, "all_stop_token_ids": 128,
    "bad_words_token_ids": 128, "logprob_token_ids": 128,
}  # fmt: skip
BAD_WORD_TOKENS = 1024
_NONE = -1


class _Split:
    """A runner's RequestState whose `prompt_len` ends where the answer begins for penalties and bad
    words: an offset's tokens are part of the answer.
    """

    def __init__(self, states: Any) -> None:
        from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

        self._states = states
        self.prompt_len = UvaBackedTensor(states.max_num_reqs, dtype=torch.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._states, name)


class Sampler:
    """Stands where the second runner's `Sampler` stood. One slot a request."""

    def __init__(
        self, max_num_reqs: int, vocab_size: int, device: torch.device, req_states: Any,
        logprobs_mode: str = "raw_logprobs", num_speculative_tokens: int = 1,
        use_fp64_gumbel: bool = False,  # noqa: ARG002
    ) -> None:  # fmt: skip
        from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
        from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
        from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState
        from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

        from ops.kernels.triton.draw import WIDTH

        if logprobs_mode != "raw_logprobs":
            what = f"logprobs_mode {logprobs_mode!r}: only raw_logprobs is served"
            raise OpsError(f"vllm.Sampler: {what}")
        if num_speculative_tokens != 1:
            raise OpsError("vllm.Sampler: speculative decoding is not served")
        self.vocab = vocab_size
        self.device = device
        self.split = _Split(req_states)
        self.penalties_state = PenaltiesState(self.split)
        self.bad_words_state = BadWordsState(self.split)
        self.logit_bias_state = LogitBiasState(max_num_reqs, device)
        self.logprob_token_ids_state = LogprobTokenIdsState(max_num_reqs, device)
        self.numbers = torch.zeros((max_num_reqs, WIDTH), dtype=torch.int32, device=device)
        self.bits = np.zeros(max_num_reqs, dtype=np.uint8)
        self.logprobs = np.full(max_num_reqs, _NONE, dtype=np.int32)
        self.edited = np.zeros(max_num_reqs, dtype=bool)
        self.rehearsing = False
        self._new: dict[int, tuple[Any, ...]] = {}  # slot -> its options, until they are written

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        """Take a request's options. Raises `OpsError` when it comes without a seed."""
        p = sampling_params
        found = sampling_hook.stream(p)
        if found is None and not self.rehearsing:
            raise OpsError("vllm.Sampler: a request reached the draw without a seed")
        seed, choice, offset = found or (0, 0, 0)
        self._new[req_idx] = (p.temperature, p.top_k, p.top_p, p.min_p, seed, choice,
                              offset + 1 - prompt_len)  # fmt: skip
        self.split.prompt_len.np[req_idx] = max(prompt_len - offset, 0)
        self.penalties_state.add_request(req_idx, p)
        self.bad_words_state.add_request(req_idx, p)
        # Its rule bans stop tokens while position < length + min_tokens, one token too long.
        self.logit_bias_state.add_request(req_idx, prompt_len - 1, _once(p))
        self.logprob_token_ids_state.add_request(req_idx, p)
        self.edited[req_idx] = (
            self.penalties_state.use_penalty[req_idx]
            or self.logit_bias_state.use_logit_bias[req_idx]
            or self.bad_words_state.num_bad_words.np[req_idx] > 0
        )
        wanted = _NONE if p.logprobs is None else p.logprobs
        self.logprobs[req_idx] = self.vocab if p.logprobs == -1 else wanted

    def apply_staged_writes(self) -> None:
        """Write new requests' numbers to the device; nothing where there are none."""
        if not self._new:
            return
        from ops.kernels.triton import draw

        slots, options = list(self._new), list(self._new.values())
        self._new.clear()
        *columns, begin = zip(*options, strict=True)
        opts = sampling.rows(*columns, positions=np.zeros(len(slots), dtype=np.int64))
        table = draw.table(opts, self.vocab)
        table[:, 3] = begin
        self.bits[slots] = draw.bits(table)
        at = sampling_hook.index(slots, self.device)
        self.numbers.index_copy_(0, at, draw.there(torch.from_numpy(table), self.device))
        self.split.prompt_len.copy_to_uva()
        self.penalties_state.apply_staged_writes()
        self.bad_words_state.apply_staged_writes()
        self.logit_bias_state.apply_staged_writes()
        self.logprob_token_ids_state.apply_staged_writes()

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        """One step: logits [N, V], a row per request of the batch -> the runner's SamplerOutput.

        Raises `OpsError` on speculative decoding.
        """
        from vllm import envs
        from vllm.v1.worker.gpu.metrics.logits import get_num_nans
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        from ops.kernels.triton import draw

        here, slots = input_batch.idx_mapping_np, input_batch.expanded_idx_mapping
        if logits.shape[0] != here.shape[0]:
            raise OpsError("vllm.Sampler: speculative decoding is not served")
        raw = input_batch.__dict__.pop("_samebits_raw", logits)
        nans = get_num_nans(logits) if envs.VLLM_COMPUTE_NANS_IN_LOGITS else None
        positions = input_batch.positions[input_batch.logits_indices]
        if self.rehearsing:
            draw.rehearse(logits)
        x = self._edit(logits, input_batch, positions) if self.edited[here].any() else logits
        token = draw.launch(x, self.numbers, slots, positions, draw.kinds(self.bits[here]))
        return SamplerOutput(
            sampled_token_ids=token.view(-1, 1),
            logprobs_tensors=self._logprobs(raw, token, here, slots),
            num_nans=nans,
            num_sampled=input_batch.seq_lens.new_ones(input_batch.num_reqs),
        )

    def _edit(self, logits: torch.Tensor, batch: Any, positions: torch.Tensor) -> torch.Tensor:
        """A float32 copy of the logits with every row's own options applied."""
        from ops.kernels.triton import edits

        here, slots = batch.idx_mapping_np, batch.expanded_idx_mapping
        x = logits.to(torch.float32, copy=True)
        lists, own = self.logit_bias_state, self.penalties_state
        if lists.num_allowed_token_ids.np[here].any():
            ids = lists.allowed_token_ids.gpu
            edits.allow(x, slots, lists.num_allowed_token_ids.gpu, ids)
        if lists.num_logit_bias.np[here].any():
            ids, bias = lists.logit_bias_token_ids.gpu, lists.logit_bias.gpu
            edits.add(x, slots, lists.num_logit_bias.gpu, ids, bias)
        if lists.num_stop_token_ids.np[here].any():
            count, ids = lists.num_stop_token_ids.gpu, lists.stop_token_ids.gpu
            edits.ban(x, slots, count, ids, positions, lists.min_lens.gpu)
        if own.use_penalty[here].any():
            edits.penalise(
                x, slots, own.repetition_penalty.gpu, own.frequency_penalty.gpu,
                own.presence_penalty.gpu, own.prompt_bin_mask, own.output_bin_counts,
            )  # fmt: skip
        ids = batch.input_ids[batch.logits_indices]
        self.bad_words_state.apply_bad_words(x, slots, here, ids, batch.expanded_local_pos)
        return x

    def _logprobs(
        self, raw: torch.Tensor, token: torch.Tensor, here: Any, slots: torch.Tensor
    ) -> Any:
        named = self.logprob_token_ids_state.max_num_token_ids(here)
        most = int(self.logprobs[here].max())
        if self.rehearsing:
            most = max(most, 1)
        if most == _NONE and not named:
            return None
        return topk_logprobs(
            raw, max(most, 0), token, None, self.logprob_token_ids_state, slots, named
        )


def topk_logprobs(
    logits: torch.Tensor, num_logprobs: int, sampled_token_ids: torch.Tensor,
    cu_num_logits: list[int] | None = None, logprob_token_ids_state: Any = None,
    expanded_idx_mapping: torch.Tensor | None = None, max_per_req_token_ids: int = 0,
) -> Any:  # fmt: skip
    """In the place of the second runner's `compute_topk_logprobs`: vLLM's LogprobsTensors for
    logits [N, V], by the definition of ops/sampling_logprobs.py.

    Column 0 is the given token, then the `num_logprobs` most likely, or the tokens that a row
    named (unused columns: token 0 at -inf).
    """
    from vllm.v1.outputs import LogprobsTensors

    found = sampling_logprobs.of_logits(logits, num_logprobs, sampled_token_ids)
    if max_per_req_token_ids:
        state, slots = logprob_token_ids_state, expanded_idx_mapping
        assert slots is not None
        names = state.token_ids.gpu[slots.long(), :max_per_req_token_ids]
        counts = state.num_token_ids.gpu[slots.long()]
        found = _with_names(logits, found, names, counts)
    return LogprobsTensors(*found, cu_num_generated_tokens=cu_num_logits)


def _with_names(
    logits: torch.Tensor, found: Sequence[torch.Tensor], names: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`found` (ids, logprobs, ranks), with named tokens in the rows whose count is not 0."""
    ids, values, ranks = found
    width = max(ids.shape[1] - 1, names.shape[1])
    column = torch.arange(width, device=ids.device)[None, :]
    by_name = (counts > 0)[:, None]
    wide = torch.zeros((ids.shape[0], width), dtype=ids.dtype, device=ids.device)
    named = wide.clone()
    wide[:, : ids.shape[1] - 1] = ids[:, 1:]
    named[:, : names.shape[1]] = names
    live = column < torch.where(by_name, counts[:, None], ids.shape[1] - 1)
    wide = torch.where(live, torch.where(by_name, named, wide), 0)
    logprobs = sampling_logprobs.log_softmax(logits).gather(-1, wide.long())
    logprobs = logprobs.masked_fill(~live, -torch.inf)
    return torch.cat((ids[:, :1], wide), 1), torch.cat((values[:, :1], logprobs), 1), ranks


def _once(params: Any) -> Any:
    """The options with no allowed token named twice: one of two writers would win."""
    allowed = params.allowed_token_ids
    if not allowed or len(set(allowed)) == len(allowed):
        return params
    params = params.clone()
    params.allowed_token_ids = sorted(set(allowed))
    return params


def fits(params: Any) -> None:
    """Raises `ValueError`, by the option's name, on lists that the second runner has no room for.

    It would find out in the middle of a step, and stop the engine.
    """
    names = {"all_stop_token_ids": "stop_token_ids", "bad_words_token_ids": "bad_words"}
    for field, most in ROOM.items():
        got = len(getattr(params, field, None) or ())
        if got > most:
            name = names.get(field, field)
            raise ValueError(f"{name} has {got} entries, and this model takes at most {most}")
    tokens = sum(len(word) for word in params.bad_words_token_ids or ())
    if tokens > BAD_WORD_TOKENS:
        raise ValueError(f"bad_words have {tokens} tokens; at most {BAD_WORD_TOKENS} are taken")


def _rehearsal(run: Any, sampler_of: Any) -> Any:
    @functools.wraps(run)
    def rehearsal(*args: Any, **kwargs: Any) -> Any:
        sampler = sampler_of(args[0])
        if sampler is None:
            return run(*args, **kwargs)
        sampler.rehearsing = True
        try:
            return run(*args, **kwargs)
        finally:
            sampler.rehearsing = False

    rehearsal._samebits = True  # type: ignore[attr-defined]
    return rehearsal


def install() -> None:
    """Bind in this process, once. Raises `OpsError` when this vLLM has no such places."""
    try:
        from vllm.v1.worker import gpu_worker
        from vllm.v1.worker.gpu import model_runner, structured_outputs
        from vllm.v1.worker.gpu.sample import prompt_logprob

        if installed():
            return
        runner, worker = model_runner.GPUModelRunner, structured_outputs.StructuredOutputsWorker
        stock_mask = worker.apply_grammar_bitmask

        def apply_grammar_bitmask(
            self: Any, logits: torch.Tensor, batch: Any, names: Any, mask: Any
        ) -> None:
            if names:  # logprobs are of the model's own logits
                batch._samebits_raw = logits.clone()
            stock_mask(self, logits, batch, names, mask)

        worker.apply_grammar_bitmask = apply_grammar_bitmask
        prompt_logprob.compute_topk_logprobs = topk_logprobs
        runner._dummy_sampler_run = _rehearsal(runner._dummy_sampler_run, lambda r: r.sampler)
        gpu_worker.warmup_kernels = _rehearsal(gpu_worker.warmup_kernels, lambda r: r.sampler)
        model_runner.Sampler = Sampler
    except (ImportError, AttributeError) as fault:
        raise OpsError(f"vllm.Sampler: this vLLM has another second runner: {fault}") from fault


def installed() -> bool:
    """Whether the second runner would make our sampler, rehearse with it and ask it for prompts."""
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.sample import prompt_logprob

    return (
        model_runner.Sampler is Sampler
        and prompt_logprob.compute_topk_logprobs is topk_logprobs
        and getattr(gpu_worker.warmup_kernels, "_samebits", False)
        and getattr(model_runner.GPUModelRunner._dummy_sampler_run, "_samebits", False)
    )
