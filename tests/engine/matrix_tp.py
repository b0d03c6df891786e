"""The matrix of `tests.engine.matrix` again, on two ranks: one process, many engines at
tensor-parallel 2.

    python -m tests.engine.matrix_tp FOLDER DTYPE quick|full

The ranks are processes of their own, so the digests are of token ids and logprobs, and not of
logits. Prints one line of JSON as `matrix` does.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engine import matrix
from tests.engine.tp_engine import model


class TwoRanks(matrix.Engine):
    """One engine whose two ranks share the model."""

    def __init__(self, folder: Path, dtype: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.mode, self.most_rows = "ours", 0
        self.logits: dict[str, list[str]] = {}
        self.llm = LLM(
            str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=320, seed=0,
            disable_log_stats=False, tensor_parallel_size=2, distributed_executor_backend="mp",
            worker_extension_cls="ops.worker.CheckExtension", **{**matrix.BASE, **options},
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        schedule = core.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            out = schedule(*args, **kwargs)
            self.most_rows = max(self.most_rows, len(out.num_scheduled_tokens))
            return out

        core.scheduler.schedule = counted

    def _digest(self, out: Any, names: dict[str, str]) -> str:
        best = out.outputs[0]
        rows = [sorted((t, p.logprob.hex(), p.rank) for t, p in d.items()) for d in best.logprobs]
        return hashlib.sha1(json.dumps([list(best.token_ids), rows]).encode()).hexdigest()[:16]

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        gc.collect()


def main(folder: str, dtype: str, size: str) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    from config import determinism, settings

    path = model(Path(folder))
    options = determinism.apply(settings.load({"device": "cpu"}), "cpu").options
    found: dict[str, Any] = {"counted": {}}
    engine = TwoRanks(path, dtype, dict(options))
    ranks = engine.llm.collective_rpc("check_ops")
    found["checks"] = {
        f"rank {r}: {op}": said
        for r, rank in enumerate(ranks)
        for op, said in rank["checks"].items()
    }
    matrix.same_engine(engine, matrix.SIZES[size], found)
    engine.close()
    more = matrix.MORE_ENGINES if size == "full" else {}
    for case, chosen in (matrix.ENGINES | more).items():
        engine = TwoRanks(path, dtype, {**options, **chosen})
        if "prefix" in case:
            matrix.prefix(engine, case, found)
        elif case == "preempted":
            found[case] = engine.run([*engine.probes(), *matrix.fillers(engine, 20, tokens=60)])
            found["counted"][case] = engine.preemptions()
        else:
            found[case] = engine.run(engine.probes())
        engine.close()
    sys.stdout.write("\nRESULT " + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
