"""Run as a process of its own under Triton's interpreter: the second runner's sampler, with vLLM's
own tables and kernels for logit_bias, bad words and penalties, against the definition.

Where a GPU's memory would be read over the bus, plain memory stands in; nothing else is replaced.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import vllm.triton_utils as utils

utils.triton, utils.tl, utils.HAS_TRITON = triton, tl, True  # before its users are imported
import vllm.utils.torch_utils as torch_utils  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils  # noqa: E402

torch_utils.async_tensor_h2d = buffer_utils.async_tensor_h2d = (  # type: ignore[assignment]
    lambda x, dtype, device: torch.tensor(x, dtype=dtype, device=device)
)


class Plain:
    """Stands for UvaBuffer."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = self.uva = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()


buffer_utils.UvaBuffer = Plain  # type: ignore[misc,assignment]

from vllm import SamplingParams  # noqa: E402
from vllm.v1.worker.gpu.sample import penalties  # noqa: E402
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402

from ops import sampling, sampling_hook, sampling_logits, sampling_logprobs  # noqa: E402
from ops import sampling_runner2 as runner2  # noqa: E402

penalties.async_tensor_h2d = buffer_utils.async_tensor_h2d
VOCAB, SLOTS = 333, 6
CPU = torch.device("cpu")


def options(rng: random.Random, i: int) -> dict[str, Any]:
    """Options of the i-th request: each kind alone, and together."""
    o: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.0]), "max_tokens": 9}
    o["extra_args"] = {"samebits": {"seed": rng.randrange(-(2**63), 2**63), "choice": i % 3,
                                    "offset": rng.choice([0, 0, 2])}}  # fmt: skip
    for name, value in (
        ("top_k", 7), ("top_p", 0.6), ("min_p", 0.1), ("repetition_penalty", 1.3),
        ("frequency_penalty", 0.9), ("presence_penalty", -0.7), ("logit_bias", {5: 3.0, 9: -2.5}),
        ("allowed_token_ids", list(range(0, VOCAB, 3))), ("min_tokens", 2), ("logprobs", 3),
    ):  # fmt: skip
        if rng.random() < 0.3:
            o[name] = value
    return o


def request(rng: random.Random, i: int) -> Any:
    p = SamplingParams(**options(rng, i))
    p._all_stop_token_ids = {4, 8}
    if rng.random() < 0.4:
        p._bad_words_token_ids = [[11], [12, 13], [1, 2, 3]]
    n = rng.randrange(4, 9)
    return SimpleNamespace(
        req_id=str(i), sampling_params=p, output_token_ids=[],
        prompt_token_ids=[rng.choice([1, 2, 12, rng.randrange(VOCAB)]) for _ in range(n)],
    )  # fmt: skip


def batch(slots: list[int], requests: list[Any]) -> Any:
    last = [len(r.prompt_token_ids) + len(r.output_token_ids) - 1 for r in requests]
    ids = [(r.prompt_token_ids + r.output_token_ids)[-1] for r in requests]
    n = len(slots)
    return SimpleNamespace(
        idx_mapping_np=np.array(slots), num_reqs=n, logits_indices=torch.arange(n),
        expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32),
        positions=torch.tensor(last), input_ids=torch.tensor(ids, dtype=torch.int32),
        expanded_local_pos=torch.zeros(n, dtype=torch.int32),
        seq_lens=torch.ones(n, dtype=torch.int32),
    )  # fmt: skip


def stock_min_tokens() -> None:
    """Plant vLLM's own rule for min_tokens."""
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

    add = LogitBiasState.add_request
    LogitBiasState.add_request = lambda self, i, n, p: add(self, i, n + 1, p)


def main(fault: str) -> None:
    rng = random.Random(5)
    if fault == "min_tokens":
        stock_min_tokens()
    states = RequestState(SLOTS, 64, 64, 0, VOCAB, CPU)
    sampler = runner2.Sampler(SLOTS, VOCAB, CPU, states)
    live: dict[int, Any] = {}
    made = steps = 0
    seen = {"edited": 0, "drawn": 0, "named": 0}
    while steps < 22:
        while len(live) < SLOTS - 1 and rng.random() < 0.7:  # slots are used again and again
            r = request(rng, made)
            made += 1
            if rng.random() < 0.3:  # as after a preemption: some of the answer is known
                r.output_token_ids = [rng.choice([12, 1, 2]) for _ in range(3)]
            tokens = r.prompt_token_ids + r.output_token_ids
            states.add_request(r.req_id, len(r.prompt_token_ids), tokens, 0, 9)
            slot = states.req_id_to_index[r.req_id]
            live[slot] = r
            begin = len(r.prompt_token_ids) + (fault == "position")
            sampler.add_request(slot, begin, r.sampling_params)
        states.apply_staged_writes()
        sampler.apply_staged_writes()
        slots = rng.sample(list(live), len(live))
        if not slots:
            continue
        steps += 1
        requests = [live[s] for s in slots]
        logits = (torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(steps))
                  * 3).bfloat16()  # fmt: skip
        logits[:, [4, 8]] += 6  # stop tokens, which min_tokens keeps away
        before = logits.clone()
        out = sampler(logits, batch(slots, requests))
        assert torch.equal(logits, before)
        edits = [sampling_hook.edits(r) for r in requests]
        want_x = sampling_logits.apply(logits.float(), edits)
        opts = sampling_hook.prepared(SimpleNamespace(), requests)
        want = sampling.draw_rows(want_x, opts)
        got = out.sampled_token_ids.view(-1)
        assert torch.equal(got, want), f"step {steps}: {got.tolist()} instead of {want.tolist()}"
        seen["edited"] += sum(not e.empty for e in edits)
        seen["drawn"] += sum(t > 0 for t in opts.inv_t)
        most = max(-1 if r.sampling_params.logprobs is None else 3 for r in requests)
        assert (out.logprobs_tensors is None) == (most < 0)
        if most > 0:
            full = sampling_logprobs.log_softmax(logits)
            ids, values, ranks = sampling_logprobs.gather(full, most, want)
            assert torch.equal(out.logprobs_tensors.logprob_token_ids, ids)
            assert torch.equal(out.logprobs_tensors.logprobs, values)
            assert torch.equal(out.logprobs_tensors.selected_token_ranks, ranks)
            names = torch.tensor([[3, 1], [0, 0]][: len(slots)] + [[9, 9]] * (len(slots) - 2))
            counts = torch.tensor([2, 0][: len(slots)] + [1] * (len(slots) - 2))
            ids2, values2, _ = runner2._with_names(logits, (ids, values, ranks), names, counts)
            assert ids2[0].tolist() == [int(want[0]), 3, 1, 0]
            assert values2[0, 1:3].tolist() == full[0, [3, 1]].tolist()
            assert values2[0, 3] == -torch.inf
            if len(slots) > 1:
                assert torch.equal(ids2[1], ids[1])
                assert torch.equal(values2[1], values[1])
            seen["named"] += 1
        for slot, r, token in zip(slots, requests, want.tolist(), strict=True):
            r.output_token_ids.append(token)
            at = len(r.prompt_token_ids) + len(r.output_token_ids)
            states.all_token_ids.gpu[slot, at - 1] = token
            states.total_len.gpu[slot] = at
            sampler.penalties_state.output_bin_counts[slot, token] += 1
            if len(r.output_token_ids) >= 6:
                states.remove_request(r.req_id)
                del live[slot]
    assert min(seen.values()) > 10, seen
    print(seen, made)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
