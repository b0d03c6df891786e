"""One real vLLM engine in this process; answers the cases of test_draw.py and prints them as JSON.

    python -m tests.engine.draw_engine ours|sync|stock|chunked FOLDER

ours: every op is ours, asynchronous scheduling. sync: without that, and with a prefix cache. stock:
as ours with vLLM's own sampler put back, so that what differs is the sampler; nothing is prefilled
in chunks there, because that engine would die. chunked: stock, and one long seeded prompt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VOCAB = 512
PROBES: dict[str, dict[str, Any]] = {
    "plain": {"seed": 42},
    "warm": {"seed": -3, "temperature": 1.7},
    "cold": {"seed": 5, "temperature": 0.3},
    "tiny": {"seed": 5, "temperature": 0.002},
    "top_k": {"seed": 1, "top_k": 5},
    "top_p": {"seed": 2, "top_p": 0.8},
    "min_p": {"seed": 3, "min_p": 0.05},
    "all three": {"seed": 4, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.9},
    "penalties": {
        "seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
    },
    "bias": {"seed": 7, "logit_bias": {5: 6.0, 6: -100.0}},
    "allowed": {"seed": 8, "allowed_token_ids": list(range(40, 60))},
    "min_tokens": {"seed": 9, "min_tokens": 8, "stop_token_ids": list(range(20, 260))},
    "greedy": {"temperature": 0},
}  # fmt: skip
LENGTHS = (5, 40, 17, 90, 3, 150, 64, 33, 16, 70, 9, 31, 50)


def model(folder: Path) -> str:
    """A two-layer Llama with random weights (std 0.04; 0.3 in the head, for peaked logits).

    The head's second half repeats the first, 0.03 % larger: logits so close that a temperature of
    0.001 and one of 0.01 differ.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / "tiny"
    if not path.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            initializer_range=0.04, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        made = LlamaForCausalLM(config)
        head = made.lm_head.weight.data
        head.normal_(0, 0.3)
        head[VOCAB // 2 :] = head[: VOCAB // 2] * 1.0003
        made.save_pretrained(path)
    return str(path)


def install(mode: str) -> None:
    from ops import device, registry
    from ops.backends import cpu

    assert device.detect().kind == "cpu"
    rows = [r for r in cpu.rows() if mode in ("ours", "sync") or r.op != "vllm.Sampler"]
    registry.install(rows)


def prompt(length: int, salt: int = 0) -> dict[str, list[int]]:
    return {
        "prompt_token_ids": [(i * i * 7 + 3 * i + salt) % (VOCAB - 3) + 3 for i in range(length)]
    }


class Cases:
    """The engine and what is asked of it. Every method returns plain lists."""

    def __init__(self, mode: str, folder: Path) -> None:
        from vllm import LLM

        self.llm = LLM(
            model(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
            max_num_batched_tokens=2048 if mode == "stock" else 64, max_num_seqs=16,
            max_model_len=256, block_size=16, num_gpu_blocks_override=40,
            async_scheduling=mode != "sync",
            enable_prefix_caching=mode == "sync", disable_log_stats=False,
        )  # fmt: skip
        self.mode = mode

    def params(self, **fields: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            **({"max_tokens": 20, "ignore_eos": True, "detokenize": False} | fields)
        )

    def ask(self, *pairs: tuple[dict[str, list[int]], dict[str, Any]]) -> list[list[list[int]]]:
        prompts, fields = zip(*pairs, strict=True)
        outs = self.llm.generate(list(prompts), [self.params(**f) for f in fields], use_tqdm=False)
        return [[list(c.token_ids) for c in o.outputs] for o in outs]

    def probes(self) -> list[tuple[dict[str, list[int]], dict[str, Any]]]:
        return [(prompt(n, 11), f) for n, f in zip(LENGTHS, PROBES.values(), strict=True)]

    def alone(self) -> list[list[int]]:
        return [self.ask(p)[0][0] for p in self.probes()]

    def together(self) -> list[list[int]]:
        return [a[0] for a in self.ask(*self.probes())]

    def crowded(self) -> list[list[int]]:
        """Backwards, between neighbours: long chunked ones, unseeded, greedy, filtered, short. The
        KV cache is too small for all, so some are preempted and computed again."""
        mixed: list[Any] = []
        for i, p in enumerate(reversed(self.probes())):
            noise = ({}, {"temperature": 0}, {"top_k": 3}, {"seed": i, "top_p": 0.5, "logprobs": 2})
            mixed += [(prompt(8 + 23 * i % 170, i), {"max_tokens": 5 + 3 * i, **noise[i % 4]}), p]
        return [a[0] for a in self.ask(*mixed)[1::2]][::-1]

    def preemptions(self) -> int:
        names = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        return int(names["vllm:num_preemptions"])

    def choices(self) -> dict[str, Any]:
        p = prompt(12, 4)
        return {
            "one": self.ask((p, {"seed": 42}))[0],
            "three": self.ask((p, {"seed": 42, "n": 3}))[0],
            "five": self.ask((p, {"seed": 42, "n": 5}))[0],
            "next seeds": [self.ask((p, {"seed": s}))[0][0] for s in (43, 44, 45, 46)],
        }

    def continued(self) -> dict[str, Any]:
        """40 tokens at once; 20, then 20 more from prompt + those 20 with the position offset."""
        out: dict[str, Any] = {"whole": [], "joined": []}
        for n, fields in ((10, {}), (70, {"top_p": 0.9}), (30, {"presence_penalty": 1.5})):
            p = prompt(n, 9)
            whole = self.ask((p, {"seed": 77, "max_tokens": 40, **fields}))[0][0]
            first = self.ask((p, {"seed": 77, "max_tokens": 20, **fields}))[0][0]
            more = {"prompt_token_ids": p["prompt_token_ids"] + first}
            own = {"samebits": {"seed": 77, "choice": 0, "offset": 20}}
            rest = self.ask((more, {"extra_args": own, "max_tokens": 20, **fields}))[0][0]
            out["whole"].append(whole)
            out["joined"].append(first + rest)
        return out

    def unseeded(self) -> dict[str, Any]:
        p = prompt(6, 2)
        outs = self.llm.generate([p, p], [self.params(), self.params()], use_tqdm=False)
        tokens = [list(o.outputs[0].token_ids) for o in outs]
        if self.mode == "stock":
            return {"tokens": tokens, "again": None}
        from ops import sampling_hook

        seeds = [sampling_hook.assigned_seed(o.request_id) for o in outs]
        again = [self.ask((p, {"seed": s}))[0][0] for s in seeds]
        return {"tokens": tokens, "again": again, "seeds": seeds}

    def greedy_seeds(self) -> list[list[int]]:
        return [self.ask((prompt(9), {"temperature": 0, "seed": s}))[0][0] for s in (1, 2, -3)]

    def different_seeds(self) -> list[list[int]]:
        return [self.ask((prompt(9), {"seed": s}))[0][0] for s in range(8)]

    def small_temperatures(self) -> list[list[list[int]]]:
        return [
            [
                self.ask((prompt(9), {"seed": s, "temperature": t, "max_tokens": 8}))[0][0]
                for s in range(6)
            ]
            for t in (0.001, 0.01)
        ]

    def recycled(self) -> dict[str, Any]:
        """A row whose owner had a list of allowed tokens gets a new owner that has none."""
        free = {"seed": 21, "max_tokens": 10}
        alone = self.ask((prompt(7, 5), free))[0][0]
        engine, got = self.llm.llm_engine, {}

        def step() -> None:
            for out in engine.step():
                got[out.request_id] = list(out.outputs[0].token_ids)

        limited = {"seed": 22, "max_tokens": 40, "allowed_token_ids": list(range(100, 120))}
        engine.add_request("short", prompt(5, 1), self.params(seed=20, max_tokens=3))
        engine.add_request("limited", prompt(6, 2), self.params(**limited))
        for _ in range(8):
            step()
        engine.add_request("free", prompt(7, 5), self.params(**free))
        while engine.has_unfinished_requests():
            step()
        return {"alone": alone, "after": got["free"]}

    def logprobs(self) -> list[list[float]]:
        """The sampled tokens' logprobs under k = 0, 1, 7, with neighbours that ask for others."""
        found = []
        for k, neighbours in ((0, 0), (1, 0), (7, 0), (2, 5)):
            pairs = [(prompt(21, 3), {"seed": 13, "logprobs": k})]
            pairs += [(prompt(5 + i, i), {"seed": i, "logprobs": i}) for i in range(neighbours)]
            prompts, fields = zip(*pairs, strict=True)
            outs = self.llm.generate(
                list(prompts), [self.params(**f) for f in fields], use_tqdm=False
            )
            best = outs[0].outputs[0]
            steps = zip(best.token_ids, best.logprobs, strict=True)
            found.append(
                [d[t].logprob for t, d in steps]
                + [float(d[t].rank) for t, d in zip(best.token_ids, best.logprobs, strict=True)]
            )
        return found  # fmt: skip

    def named_logprobs(self) -> list[Any]:
        """Logprobs of tokens asked for by id, alone and beside one who asks for the best three."""
        asked = (prompt(21, 3), {"seed": 13, "logprob_token_ids": [5, 6, 7], "max_tokens": 5})
        beside = (prompt(9, 1), {"seed": 1, "logprobs": 3, "max_tokens": 5})
        found = []
        for pairs in ((asked,), (asked, beside), (beside,), (beside, asked)):
            prompts, fields = zip(*pairs, strict=True)
            outs = self.llm.generate(
                list(prompts), [self.params(**f) for f in fields], use_tqdm=False
            )
            steps = outs[0].outputs[0].logprobs
            found.append([sorted((t, p.logprob) for t, p in d.items()) for d in steps])
        return found

    def refused(self) -> str:
        try:
            self.ask((prompt(5), {"extra_args": {"samebits": {"seed": 2**63}}}))
        except ValueError as fault:
            return str(fault)
        return ""

    def chunked_seed(self) -> str:
        """A seeded prompt longer than max_num_batched_tokens. Last: stock's engine dies of it."""
        try:
            self.ask((prompt(150), {"seed": 1}))
        except Exception as fault:  # whatever kills the engine is the answer
            return f"{type(fault).__name__}: {fault}"
        return "answered"


NAMES = (
    "together", "crowded", "preemptions", "choices", "continued", "unseeded", "greedy_seeds",
    "different_seeds", "small_temperatures", "recycled", "logprobs", "named_logprobs",
    "refused", "chunked_seed",
)  # fmt: skip
WITHOUT = {
    "stock": ("continued", "named_logprobs", "refused", "chunked_seed"),
    "chunked": NAMES[:-1],
}


def main(mode: str, folder: str) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_PLUGINS="", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS="1",
    )  # fmt: skip
    install(mode)
    cases = Cases(mode, Path(folder))
    names = [n for n in NAMES if n not in WITHOUT.get(mode, ())]
    found: dict[str, Any] = {} if mode == "chunked" else {"alone": cases.alone()}
    found |= {n: getattr(cases, n)() for n in names}
    sys.stdout.write("\nRESULT " + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # an engine that a case has killed would hang at exit


if __name__ == "__main__":
    main(*sys.argv[1:])
