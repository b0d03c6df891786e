"""Run as a script by test_evidence_offline: one of the two roads to reproducibility, on the same
prompts.

    two_roads.py schedule MODEL    stock vLLM, one process, deterministic scheduling
    two_roads.py invariant MODEL   ours: batch-invariant ops

Prints one JSON line: the prompts' tokens and logprobs together and alone, and a random number of
the caller's own.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

PROMPTS = ["Hello, my name is", "The president of the United States is", "The future of AI is"]


def engine(road: str, model: str, seed: int):
    if road == "schedule":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_PLUGINS"] = ""  # stock: our plugin stays out
        options = {"enforce_eager": True}
    else:
        from config import determinism, device, settings

        options = dict(determinism.apply(settings.load(), device.detect().kind).options)
    from vllm import LLM

    random.seed(seed)  # importing draws from it too, whatever the road: some library rolls a die
    return LLM(
        model, dtype="float32", kv_cache_memory_bytes=64 << 20, max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=256, **options,
    )  # fmt: skip


def answers(llm, prompts):
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    found = []
    for output in llm.generate(prompts, options, use_tqdm=False):
        choice = output.outputs[0]
        logprobs = [
            step[t].logprob for step, t in zip(choice.logprobs, choice.token_ids, strict=True)
        ]
        found.append([list(choice.token_ids), logprobs])
    return found


def main() -> None:
    road, model = sys.argv[1:]
    seed = time.time_ns()
    llm = engine(road, model, seed)
    together = answers(llm, PROMPTS)
    drawn = random.randint(0, 10**9)
    alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    untouched = drawn == random.Random(seed).randint(0, 10**9)
    shown = {"together": together, "alone": alone, "drawn": drawn, "untouched": untouched}
    print("ROADS", json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
