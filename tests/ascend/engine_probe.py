"""Runs in the stand-in environment: one engine in one process; prints what was bound and
reached."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

STOCK = ("npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_fused_infer_attention_score")


def main(model: str) -> None:
    from config import determinism, settings

    chosen = settings.load(
        {"model": model, "max_model_len": 128, "max_num_batched_tokens": 128, "device": "npu"}
    )
    forced = determinism.apply(chosen, "npu")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        max_model_len=128,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        num_gpu_blocks_override=64,
        gpu_memory_utilization=0.5,
        dtype="float16",
        worker_extension_cls="ops.worker.CheckExtension",
        **forced.options,
    )
    report: dict[str, Any] = llm.collective_rpc("check_ops")[0]
    from samebits_standin import ops as standin

    from ops import bindings_ascend

    before, stock = Counter(bindings_ascend.hits), Counter(standin.calls)
    options = SamplingParams(temperature=1.0, seed=5, max_tokens=5, logprobs=2, ignore_eos=True)
    prompts = ["Hello world", "a", "The quick brown fox"]
    together = [answer(o) for o in llm.generate(prompts, options, use_tqdm=False)]
    alone = [answer(llm.generate([p], options, use_tqdm=False)[0]) for p in prompts]
    core = llm.llm_engine.engine_core.engine_core
    print(
        json.dumps(
            {
                "faults": {op: said for op, said in report["checks"].items() if said != "ok"},
                "hits": dict(bindings_ascend.hits - before),
                "stock": {k: v for k, v in (standin.calls - stock).items() if k in STOCK},
                "together": together,
                "alone": alone,
                "scheduler": type(core.scheduler).__name__,
            }
        )
    )


def answer(output: Any) -> Any:
    chosen = output.outputs[0]
    tops = [sorted((t, x.logprob) for t, x in step.items()) for step in chosen.logprobs]
    return [list(chosen.token_ids), tops]


if __name__ == "__main__":
    main(sys.argv[1])
