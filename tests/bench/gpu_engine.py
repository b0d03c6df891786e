"""One vLLM engine on a GPU in one mode, told what to do by lines on its standard input.

    python -m tests.bench.gpu_engine SHAPE MODE OUT.json [--kv GIB] [--blocks N] [--batched N]

SHAPE: a name of tests.bench.gpu_models. MODE: stock | vllm (VLLM_BATCH_INVARIANT=1) | ours. Lines:
start, check, bits, lap (one round of the clock), profile, quit. Each is answered by a line
"@@ {json}" and the report in OUT.json is written anew. So several engines live on one GPU and take
turns with the clock (tests.bench.gpu_session). Everything runs compiled, with CUDA graphs. No
tokenizer: token ids in, token ids and logprobs out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.bench import gpu_models


def arguments() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser()
    p.add_argument("shape", choices=list(gpu_models.SHAPES))
    p.add_argument("mode", choices=("stock", "vllm", "ours"))
    p.add_argument("out")
    p.add_argument("--kv", type=float, default=10)
    p.add_argument("--blocks", type=int, default=0)
    p.add_argument("--batched", type=int, default=8192)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return p.parse_args()


class Bench:
    """One engine and what is asked of it."""

    def __init__(self, args: argparse.Namespace, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt

        gpu_models.install()
        self.args = args
        self.report: dict[str, Any] = {"shape": args.shape, "mode": args.mode, "bits": {},
                                       "laps": []}  # fmt: skip
        self.sampling, self.tokens = SamplingParams, TokensPrompt
        started = time.time()
        options = {"generation_config": "vllm", **options}
        options["kv_cache_memory_bytes"] = int(args.kv * 2**30)
        if args.blocks:
            options["num_gpu_blocks_override"] = args.blocks
            options["disable_log_stats"] = False  # counts preemptions
        model = gpu_models.configuration(args.shape, Path(args.out).parent / "models")
        self.llm = LLM(model=str(model), load_format="dummy", skip_tokenizer_init=True,
                       max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=args.batched,
                       gpu_memory_utilization=0.05, **options)  # fmt: skip
        self.report["start_s"] = time.time() - started
        config = self.llm.llm_engine.vllm_config
        self.report["runner"] = "V2" if config.use_v2_model_runner else "V1"
        self.report["graphs"] = str(config.compilation_config.cudagraph_mode)
        self.report["async_scheduling"] = config.scheduler_config.async_scheduling
        self.vocab = min(150000, config.model_config.get_vocab_size())
        rng = random.Random(7)
        self.probe = [self.prompt(rng, n) for n in (5, 17, 64, 129, 300, 777, 1500, 33)]
        self.fill = [self.prompt(rng, rng.choice((8, 31, 100, 250, 512, 900))) for _ in range(248)]
        self.big = [self.prompt(rng, 512) for _ in range(128)]
        self.long = [self.prompt(rng, 3500) for _ in range(6)]

    def prompt(self, rng: random.Random, n: int) -> Any:
        return self.tokens(prompt_token_ids=[rng.randrange(1000, self.vocab) for _ in range(n)])

    def params(self, seed: int, temperature: float, n: int = 64) -> Any:
        return self.sampling(temperature=temperature, seed=1000 + seed, max_tokens=n, min_tokens=n,
                             logprobs=0, ignore_eos=True, detokenize=False)  # fmt: skip

    @staticmethod
    def digest(output: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
        choice = output.outputs[0]
        logprobs = (next(iter(d.values())).logprob for d in choice.logprobs)
        return tuple(choice.token_ids), tuple(logprobs)

    def run(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        return [self.digest(o) for o in self.llm.generate(prompts, params, use_tqdm=False)]

    def compare(self, name: str, wanted: list[Any], got: list[Any]) -> None:
        pairs = list(zip(wanted, got, strict=True))
        equal = sum(a == b for a, b in pairs)
        self.report["bits"][name] = f"{equal}/{len(pairs)}"
        if equal < len(pairs):  # where each begins to differ: tokens, logprobs
            first = [[next((i for i, (u, v) in enumerate(zip(a[k], b[k], strict=True)) if u != v),
                           -1) for k in (0, 1)] for a, b in pairs]  # fmt: skip
            self.report.setdefault("first difference", {})[name] = first

    def bits(self) -> None:
        """The matrix of issue B that a single engine can show."""
        llm, n = self.llm, len(self.probe)
        for temperature in (0.0, 1.0):
            mine = [self.params(i, temperature) for i in range(n)]
            others = [self.params(100 + i, temperature) for i in range(len(self.fill))]
            alone = []
            for p, s in zip(self.probe, mine, strict=True):
                llm.reset_prefix_cache()
                alone += self.run([p], [s])
            tag = f"T={temperature}"
            self.report.setdefault("alone", {})[tag] = hashlib.sha256(
                repr(alone).encode()
            ).hexdigest()
            again = sum((self.run([p], [s]) for p, s in zip(self.probe, mine, strict=True)), [])
            self.compare(f"{tag} prefix hit", alone, again)
            llm.reset_prefix_cache()
            self.compare(f"{tag} batch 8", alone, self.run(self.probe, mine))
            llm.reset_prefix_cache()
            self.compare(f"{tag} batch 8 reversed", alone,
                         self.run(self.probe[::-1], mine[::-1])[::-1])  # fmt: skip
            for count, place in ((24, 24), (120, 0), (120, 50), (248, 131)):
                llm.reset_prefix_cache()
                prompts = self.fill[:place] + self.probe + self.fill[place:count]
                params = others[:place] + mine + others[place:count]
                got = self.run(prompts, params)[place : place + n]
                self.compare(f"{tag} batch {count + n} at {place}", alone, got)
            llm.reset_prefix_cache()
            self.compare(f"{tag} prefill bursts", alone, self.burst(mine))
        llm.reset_prefix_cache()
        for temperature in (0.0, 1.0):
            params = [self.params(i, temperature, 128) for i in range(44)]
            runs = [hashlib.sha256(repr(self.run(self.fill[:44], params)).encode()).hexdigest()
                    for _ in range(5)]  # fmt: skip
            self.report["bits"][f"T={temperature} 44 together x5, outcomes"] = len(set(runs))
        self.report["bits"]["preemptions"] = self.preemptions()

    def burst(self, mine: list[Any]) -> list[Any]:
        """The probes decode while long prompts arrive, one every few steps."""
        engine = self.llm.llm_engine
        for i, (p, s) in enumerate(zip(self.probe, mine, strict=True)):
            engine.add_request(f"probe{i}", p, s)
        done: dict[str, Any] = {}
        step = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
            step += 1
            if step % 7 == 3 and step // 7 < len(self.long):
                engine.add_request(f"long{step}", self.long[step // 7], self.params(step, 1.0, 4))
        return [self.digest(done[next(k for k in done if k.startswith(f"probe{i}"))])
                for i in range(len(mine))]  # fmt: skip

    def preemptions(self) -> float:
        try:
            found = [m for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"]
            return float(sum(m.value for m in found))
        except Exception:
            return -1

    def lap(self) -> None:
        """One round of the clock: 128 × (512 in + 128 out) and one stream of 128 tokens, at
        temperature 1 with seeds and logprobs, and the stream and the batch greedy without."""
        found: dict[str, float] = {}
        seeded = [self.params(i, 1.0, 128) for i in range(128)]
        greedy = [self.sampling(temperature=0.0, max_tokens=128, min_tokens=128, ignore_eos=True,
                                detokenize=False)] * 128  # fmt: skip
        for name, params in (("", seeded), (" greedy", greedy)):
            self.llm.reset_prefix_cache()
            seconds = [self.clock(self.big, params), self.clock(self.big[:1], params[:1])]
            found["tok_s" + name] = 128 * 128 / seconds[0]
            found["ms_per_token" + name] = seconds[1] / 128 * 1e3
        self.report["laps"].append(found)

    def clock(self, prompts: list[Any], params: list[Any]) -> float:
        """Seconds of one generate."""
        begin = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    def profile(self) -> None:
        """Where the time of one stream and of a batch goes: kernels by name, host functions."""
        for name, prompts in (("one", self.big[:1]), ("many", self.big)):
            self.report["profile " + name] = self.traced(prompts)

    def traced(self, prompts: list[Any]) -> dict[str, Any]:
        """32 tokens of each prompt: under cProfile, under torch's profiler, and free."""
        import cProfile
        import pstats

        import torch
        from torch.profiler import ProfilerActivity

        params = [self.params(i, 1.0, 32) for i in range(len(prompts))]
        found: dict[str, Any] = {}
        self.clock(prompts, params)
        found["s"] = self.clock(prompts, params)  # every prompt is in the prefix cache now
        host = cProfile.Profile()
        host.enable()
        self.clock(prompts, params)
        host.disable()
        stats: Any = pstats.Stats(host)
        rows = sorted(stats.stats.items(), key=lambda kv: -kv[1][2])[:45]
        found["host"] = [[f"{Path(k[0]).name}:{k[1]} {k[2]}", v[1], round(v[2] * 1e3, 3),
                          round(v[3] * 1e3, 3)] for k, v in rows]  # fmt: skip
        what = ProfilerActivity.CUDA if self.args.device == "cuda" else ProfilerActivity.CPU
        with torch.profiler.profile(activities=[what]) as seen:
            self.clock(prompts, params)
        events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
        found["device_ms"] = sum(e.self_device_time_total for e in events) / 1e3
        found["kernels"] = [
            [e.key[:120], e.count, round(e.self_device_time_total, 1)] for e in events[:30]
        ]
        return found

    def check(self) -> None:
        """The start's self-check in this process, which is the worker too. What is loaded by then
        is frozen in every mode, as vLLM does in an engine's own process.
        """
        from ops import registry

        if self.args.mode == "ours":
            begin = time.time()
            self.report["checks"] = registry.report(True)
            self.report["checks"]["elapsed_s"] = time.time() - begin
        gc.collect()
        gc.freeze()


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """Set what makes a mode, before anything is imported; returns its engine options."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_PLUGINS"] = "samebits" if args.mode == "ours" else ""
    os.environ["VLLM_CACHE_ROOT"] = str(Path(args.out).parent / f"cache-{args.mode}")
    if args.mode == "stock":
        return {}
    if args.mode == "vllm":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        return {"disable_cascade_attn": True}
    from config.determinism import Force, export, table

    rows = [row for row in table(args.device) if isinstance(row, Force)]
    export({row.name: row.value for row in rows if row.kind == "env"})
    return {row.name: row.value for row in rows if row.kind == "option"}


def one_planner_at_a_time(folder: Path) -> None:
    """Engines that start together must not disturb each other's race of algorithms."""
    import fcntl

    from ops.kernels.dense import Planner

    free = Planner._bands

    def bands(self: Any, *args: Any) -> Any:
        with open(folder / "planner.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return free(self, *args)

    Planner._bands = bands  # type: ignore[method-assign]


def obey(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Read commands until quit; a fault is part of the answer."""
    bench: Bench | None = None
    for line in sys.stdin:
        command = line.strip()
        if command == "quit":
            return
        begin = time.time()
        answer: dict[str, Any] = {"did": command}
        try:
            if command == "start":
                bench = Bench(args, options)
            else:
                getattr(bench, command)()
        except BaseException as fault:
            traceback.print_exc()
            answer["fault"] = f"{type(fault).__name__}: {str(fault)[:600]}"
        answer["s"] = round(time.time() - begin, 1)
        if bench is not None:
            bench.report.setdefault("answers", []).append(answer)
            with contextlib.suppress(OSError):
                Path(args.out).write_text(json.dumps(bench.report, default=str))
        print("@@", json.dumps(answer), flush=True)


def main() -> None:
    args = arguments()
    options = environment(args)
    import vllm  # noqa: F401

    if args.mode == "ours" and args.device == "cuda":
        one_planner_at_a_time(Path(args.out).parent)
    print("@@", json.dumps({"did": "import"}), flush=True)
    obey(args, options)


if __name__ == "__main__":
    main()
