"""Two engines at tensor-parallel 2 on the CPU; prints the digests of the same probes as JSON.

    python -m tests.engine.tp_engine FOLDER ours|planted

ours: every op is ours. planted: the ordered sum rounds what it adds to 1/64 as soon as more than
eight rows travel together, on both ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ops.worker import CheckExtension

LENGTHS = (1, 5, 16, 17, 40, 90, 130)
ENGINES: dict[str, dict[str, Any]] = {
    "whole": {"enable_prefix_caching": False},
    "chunks of 16": {
        "max_num_batched_tokens": 16, "max_num_seqs": 16, "enable_prefix_caching": True,
    },
}  # fmt: skip


class Extension(CheckExtension):
    """What the tests ask of every rank."""

    def plant(self) -> None:
        """Make the sum look at the size of the message."""
        import torch

        from ops import collectives

        stock = collectives.ordered_sum

        def looks_at_size(parts: torch.Tensor) -> torch.Tensor:
            if parts.numel() > len(parts) * 8 * 128:
                return stock((parts.float() * 64).round().div(64).to(parts.dtype))
            return stock(parts)

        collectives.ordered_sum = looks_at_size

    def order(self) -> list[str]:
        """Which functions reduce in this process."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group().device_communicator
        return [f"{m.__module__}.{m.__name__}" for m in (group.all_reduce, group.reduce_scatter)]


def model(folder: Path) -> Path:
    """A two-layer Qwen3 whose heads and widths two ranks can share."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = folder / "tp"
    if not path.exists():
        torch.manual_seed(5)
        made = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=384, hidden_size=128, intermediate_size=208, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=64, initializer_range=0.04,
                max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
        made.lm_head.weight.data.normal_(0, 0.3)
        made.to(torch.bfloat16).save_pretrained(path)
    return path


def prompt(length: int, salt: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(i * i * 7 + 3 * i + 31 * salt) % 380 + 3 for i in range(length)]}


def params(i: int) -> Any:
    from vllm import SamplingParams

    heat = 0.9 if i % 2 else 0.0
    return SamplingParams(
        temperature=heat, seed=i, max_tokens=8, logprobs=4, ignore_eos=True, detokenize=False
    )


def digest(output: Any) -> str:
    best = output.outputs[0]
    rows = [sorted((t, p.logprob.hex()) for t, p in d.items()) for d in best.logprobs]
    return hashlib.sha1(json.dumps([list(best.token_ids), rows]).encode()).hexdigest()[:16]


def runs(llm: Any) -> dict[str, list[str]]:
    """{how: digest of each probe}, probes in the same order everywhere."""
    probes = [prompt(n) for n in LENGTHS]
    chosen = [params(i) for i in range(len(probes))]
    more = [prompt(2 + 5 * i, i + 1) for i in range(12)]
    mores = [params(i) for i in range(len(more))]

    def ask(prompts: list[Any], sampling: list[Any]) -> list[str]:
        return [digest(o) for o in llm.generate(prompts, sampling, use_tqdm=False)]

    return {
        "alone": [ask([p], [c])[0] for p, c in zip(probes, chosen, strict=True)],
        "together": ask(probes, chosen),
        "reversed": ask(probes[::-1], chosen[::-1])[::-1],
        "among others": ask([*more, *probes], [*mores, *chosen])[len(more) :],
    }


def main(folder: Path, mode: str) -> None:
    from config import determinism, settings

    path = model(folder)
    forced = determinism.apply(settings.load({"device": "cpu"}), "cpu")
    from vllm import LLM

    found: dict[str, Any] = {}
    for name, options in ENGINES.items():
        base = {"max_num_batched_tokens": 512, "max_num_seqs": 32, **forced.options, **options}
        llm = LLM(
            str(path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, seed=0,
            tensor_parallel_size=2, distributed_executor_backend="mp",
            worker_extension_cls="tests.engine.tp_engine.Extension", **base,
        )  # fmt: skip
        reports = llm.collective_rpc("check_ops", args=(True,))
        found[name] = {
            "hashes": [r["hash"] for r in reports],
            "faults": [{op: v for op, v in r["checks"].items() if v != "ok"} for r in reports],
            "order": llm.collective_rpc("order"),
        }
        if mode == "planted":
            llm.collective_rpc("plant")
            again = llm.collective_rpc("check_ops", args=(True,))
            found[name]["planted"] = [r["checks"]["vllm.CpuCommunicator.all_reduce"] for r in again]
        found[name]["runs"] = runs(llm)
        llm.llm_engine.engine_core.shutdown()
        if mode == "planted":
            break
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    main(Path(sys.argv[1]), sys.argv[2])
