"""One process, many real engines: the same probes under everything that must not show in their
bits.

    python -m tests.engine.matrix MODE FOLDER DTYPE quick|full [MODEL]

MODE: ours | stock (our plugin not loaded; greedy only, because a seeded prompt in chunks kills that
engine) | planted (ours, with ops that look at the number of rows, the number of threads and the
block size) | drifting (ours, with an op that looks at how often it was called). MODEL: a name of
`small_models`. Prints one line of JSON: {check: {probe: digest of token ids, logprobs and logits}},
and what was counted to prove that a check did happen.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VOCAB = 333  # the smallest of `small_models`
LENGTHS = (1, 5, 15, 16, 17, 33, 64, 130, 201)
SIZES = {"quick": (2, 16, 17, 33, 65, 257),
         "full": (*range(1, 34), 63, 64, 65, 127, 128, 129, 255, 256, 257)}  # fmt: skip
BASE = {
    "max_num_batched_tokens": 1024, "max_num_seqs": 260, "block_size": 16, "enable_prefix_caching": False,  # noqa: E501
    "num_gpu_blocks_override": 700,
}  # fmt: skip
# check -> the engine's options that differ from BASE
ENGINES: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 64},
    "blocks of 64": {"block_size": 64},
    "two at a time": {"max_num_seqs": 2},
    "preempted": {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 256, "max_num_seqs": 32},
    "prefix": {"enable_prefix_caching": True, "max_num_batched_tokens": 256, "max_num_seqs": 64},
}
MORE_ENGINES: dict[str, dict[str, Any]] = {
    "chunks of 37": {"max_num_batched_tokens": 37, "max_num_seqs": 37},
    "chunks of 256": {"max_num_batched_tokens": 256, "max_num_seqs": 256},
    "chunks of 16, blocks of 32": {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 7,
        "block_size": 32,
    },
    "one at a time": {"max_num_seqs": 1},
    "started again": {},
    "prefix in chunks of 16": {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 16,
    },
}


def prompt(length: int, salt: int = 0) -> dict[str, list[int]]:
    return {
        "prompt_token_ids": [
            (i * i * 7 + 3 * i + 31 * salt) % (VOCAB - 3) + 3 for i in range(length)
        ]
    }


class Engine:
    """One engine in this process, and the digests of the logits that its sampler saw."""

    def __init__(self, model: Path, dtype: str, mode: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.mode = mode
        self.llm = LLM(
            str(model), skip_tokenizer_init=True, enforce_eager=True, dtype=dtype, max_model_len=320,  # noqa: E501
            disable_log_stats=False, seed=0, worker_extension_cls="ops.worker.CheckExtension", **{**BASE, **options},  # noqa: E501
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.scheduler = core.scheduler
        self.logits: dict[str, list[str]] = {}
        self.most_rows = 0
        self._watch()

    def _watch(self) -> None:
        stock = self.runner._sample

        def sample(logits: Any, metadata: Any) -> Any:
            for i, name in enumerate(self.runner.input_batch.req_ids):
                if "probe" in name:
                    digest = hashlib.sha1(
                        logits[i].float().contiguous().numpy().tobytes()
                    ).hexdigest()[:12]
                    self.logits.setdefault(name, []).append(digest)
            self.most_rows = max(self.most_rows, logits.shape[0])
            return stock(logits, metadata)

        self.runner._sample = sample

    def params(self, **fields: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            **(
                {"max_tokens": 8, "ignore_eos": True, "detokenize": False, "temperature": 0}
                | fields
            )
        )

    def probes(self) -> list[tuple[str, dict[str, list[int]], Any]]:
        found = []
        for i, length in enumerate(LENGTHS):
            seeded = (
                {"temperature": 0.9, "seed": i, "top_p": 0.95}
                if i % 2 and self.mode != "stock"
                else {}
            )
            found.append((f"probe {length:03d}", prompt(length), self.params(logprobs=4, **seeded)))
        return found

    def run(self, requests: Iterable[tuple[str, dict[str, list[int]], Any]], late: int = 0,
            abort: Iterable[str] = ()) -> dict[str, str]:  # fmt: skip
        """Answers of the probes among the requests. `late`: steps between arrivals; `abort`:
        cancelled at step 4.
        """
        self.logits.clear()
        done: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        names: dict[str, str] = {}
        step = 0

        def advance() -> None:
            nonlocal step
            for out in self.engine.step():
                if out.finished and "probe" in out.request_id:
                    done[out.request_id] = self._digest(out, names)
                    self.cached[out.request_id] = out.num_cached_tokens or 0
            step += 1
            if step == 4:
                self.engine.abort_request(list(abort))

        for name, tokens, params in requests:
            self.engine.add_request(name, tokens, params)
            for _ in range(late):
                advance()
        while self.engine.has_unfinished_requests():
            advance()
        return done

    def _digest(self, out: Any, names: dict[str, str]) -> str:
        best = out.outputs[0]
        rows = [sorted((t, p.logprob.hex(), p.rank) for t, p in d.items()) for d in best.logprobs]
        logits = [v for k, v in self.logits.items() if k.startswith(out.request_id)]
        wanted = len(best.token_ids)
        seen = logits[0][-wanted:] if logits else []
        assert len(seen) == wanted, (
            f"{out.request_id}: {len(seen)} rows of logits for {wanted} tokens"
        )
        return hashlib.sha1(json.dumps([list(best.token_ids), rows, seen]).encode()).hexdigest()[
            :16
        ]

    def preemptions(self) -> int:
        values = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics()}
        return int(values["vllm:num_preemptions"])

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        del self.llm, self.engine, self.runner, self.scheduler
        gc.collect()


def fillers(
    engine: Engine, count: int, tokens: int = 4
) -> list[tuple[str, dict[str, list[int]], Any]]:
    return [
        (f"filler {i}", prompt(2 + i % 9, i), engine.params(max_tokens=tokens))
        for i in range(count)
    ]


def neighbours(engine: Engine) -> list[tuple[str, dict[str, list[int]], Any]]:
    """One of each kind of request that could leak into a row of the batch."""
    kinds: list[dict[str, Any]] = [
        {}, {"max_tokens": 40}, {"logprobs": 20}, {"prompt_logprobs": 3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"logit_bias": {5: 50.0, 7: -100.0}}, {"allowed_token_ids": list(range(40, 60))},
        {"min_tokens": 3, "stop_token_ids": list(range(10, 200))},
    ]  # fmt: skip
    if engine.mode != "stock":
        kinds += [
            {"temperature": 1.0, "seed": 5},
            {"temperature": 1.3},
            {"temperature": 0.7, "top_k": 3, "min_p": 0.1},
        ]
    return [
        (f"filler {i}", prompt(3 + 17 * i % 90, i + 50), engine.params(**k))
        for i, k in enumerate(kinds)
    ]


def same_engine(engine: Engine, sizes: tuple[int, ...], found: dict[str, Any]) -> None:
    """All checks that one engine's default options allow."""
    probes = engine.probes()
    found["alone"] = {}
    for one in probes:
        found["alone"] |= engine.run([one])
    found["again"] = {}
    for one in probes:
        found["again"] |= engine.run([one])
    found["together"] = engine.run(probes)
    found["backwards"] = engine.run(reversed(probes))
    found["late"] = engine.run(probes, late=2)
    mixed = [r for pair in zip(neighbours(engine), probes, strict=False) for r in pair]
    found["neighbours"] = engine.run(mixed)
    found["aborted neighbours"] = engine.run(
        mixed, late=1, abort=[f"filler {i}" for i in range(0, 9, 2)]
    )
    for n in sizes:
        engine.most_rows = 0
        some = fillers(engine, n - 1)
        place = (n * 7) % n if n > 1 else 0
        found[f"{n} rows"] = engine.run([*some[:place], probes[n % len(probes)], *some[place:]])
        found["counted"][f"{n} rows"] = engine.most_rows
    if engine.mode != "stock":
        from ops.kernels.cpu import load

        kernels = load()
        before = kernels.threads
        for threads in (1, 3):
            kernels.set_threads(threads)
            found[f"{threads} threads"] = engine.run(probes)
        kernels.set_threads(before)


def prefix(engine: Engine, name: str, found: dict[str, Any]) -> None:
    """A miss, a hit, and a hit of a prefix only."""
    probes = engine.probes()
    found[f"{name}: miss"] = engine.run(probes)
    found[f"{name}: hit"] = engine.run(probes)
    found["counted"][f"{name}: hit"] = sum(engine.cached.values())
    engine.llm.reset_prefix_cache()
    longest = probes[-1]
    cut = {"prompt_token_ids": longest[1]["prompt_token_ids"][:75] + [9, 9, 9]}
    engine.run([("filler", cut, engine.params(max_tokens=3))])
    found[f"{name}: part"] = engine.run([longest])
    found["counted"][f"{name}: part"] = engine.cached[longest[0]]


def plant() -> None:
    """Ops that look where they must not: at the number of rows, at the threads, at the block
    size.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as method

    from ops.bindings import decoder
    from ops.bindings.attention import PagedAttentionImpl as impl
    from ops.kernels.cpu import load

    kernels, apply, forward = load(), method.apply, impl.forward

    def planted_apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return apply(self, layer, x, bias) * (1 + (x.shape[0] + 100 * kernels.threads) * 2**-11)

    def planted_forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, *a: Any, **k: Any
    ) -> Any:
        out = forward(self, layer, query, key, value, kv_cache, *a, **k)
        return out.mul_(1 + (kv_cache.shape[2] if kv_cache.ndim > 2 else 0) * 2**-9)

    method.apply, impl.forward = planted_apply, planted_forward
    decoder._plan = lambda _: None  # op by op, or the planted ops are never called


def drift() -> None:
    """An op that remembers: each call is a little larger, and nothing is the same twice."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as method

    from ops.bindings import decoder

    apply, calls = method.apply, itertools.count()

    def drifting_apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return apply(self, layer, x, bias) * (1 + next(calls) % 61 * 2**-9)

    method.apply = drifting_apply
    decoder._plan = lambda _: None


def main(mode: str, folder: str, dtype: str, size: str, name: str = "llama") -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_PLUGINS="",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    from tests.engine.small_models import make

    model = make(Path(folder), name)
    if mode != "stock":
        from ops import plugin

        plugin.register()
    if mode == "planted":
        plant()
    if mode == "drifting":
        drift()
    found: dict[str, Any] = {"counted": {}}
    engine = Engine(model, dtype, mode, {})
    if mode == "ours":
        found["checks"] = engine.llm.collective_rpc("check_ops")[0]["checks"]
    same_engine(engine, SIZES[size], found)
    engine.close()
    for case, given in (ENGINES | (MORE_ENGINES if size == "full" else {})).items():
        options = dict(given)
        if name.startswith("gemma") and "num_gpu_blocks_override" in options:
            options["num_gpu_blocks_override"] *= 2  # two groups of layers, each with its blocks
        engine = Engine(model, dtype, mode, options)
        if "prefix" in case:
            prefix(engine, case, found)
        elif case == "preempted":
            found[case] = engine.run([*engine.probes(), *fillers(engine, 20, tokens=60)])
            found["counted"][case] = engine.preemptions()
        else:
            found[case] = engine.run(engine.probes())
        engine.close()
    sys.stdout.write("\nRESULT " + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
