"""One vLLM engine on a GPU in one mode: bits of the same requests in every company, then times.

    python -m tests.bench.gpu_engine MODEL MODE OUT.json [--peers N --index I --sync DIR] [options]

MODE: stock | vllm (VLLM_BATCH_INVARIANT=1) | ours. With peers, N engines of other modes live on the
same GPU: all prove their bits, then take turns with the clock, one at a time, so that A and B are
interleaved. Options: --kv GIB (KV cache), --blocks N (few blocks: preemption), --no-times.
Everything runs compiled, with CUDA graphs. No tokenizer: token ids in, token ids and logprobs out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser()
    p.add_argument("model")
    p.add_argument("mode", choices=("stock", "vllm", "ours"))
    p.add_argument("out")
    p.add_argument("--peers", type=int, default=1)
    p.add_argument("--index", type=int, default=0)
    p.add_argument("--sync", default="")
    p.add_argument("--kv", type=float, default=12)
    p.add_argument("--blocks", type=int, default=0)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--no-times", action="store_true")
    p.add_argument("--no-bits", action="store_true")
    return p.parse_args()


class Bench:
    """One engine and what is asked of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt

        self.args = args
        self.report: dict[str, Any] = {"model": args.model, "mode": args.mode, "bits": {}}
        self.sampling, self.tokens = SamplingParams, TokensPrompt
        started = time.time()
        options: dict[str, Any] = {"kv_cache_memory_bytes": int(args.kv * 2**30)}
        if args.mode != "stock":
            options["disable_cascade_attn"] = True
        if args.blocks:
            options["num_gpu_blocks_override"] = args.blocks
        self.llm = LLM(model=args.model, skip_tokenizer_init=True, max_model_len=4096,
                       max_num_seqs=256,
                       gpu_memory_utilization=0.2, **options)  # fmt: skip
        self.report["start_s"] = time.time() - started
        rng = random.Random(7)
        self.probe = [self.prompt(rng, n) for n in (5, 17, 64, 129, 300, 777, 1500, 33)]
        self.fill = [self.prompt(rng, rng.choice((8, 31, 100, 250, 512, 900))) for _ in range(248)]
        self.big = [self.prompt(rng, 512) for _ in range(128)]
        self.long = [self.prompt(rng, 3500) for _ in range(6)]

    def prompt(self, rng: random.Random, n: int) -> Any:
        return self.tokens(prompt_token_ids=[rng.randrange(1000, 150000) for _ in range(n)])

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
        equal = sum(a == b for a, b in zip(wanted, got, strict=True))
        tokens = sum(a[0] == b[0] for a, b in zip(wanted, got, strict=True))
        self.report["bits"][name] = f"{equal}/{len(wanted)}"
        self.report["bits"][name + " tokens"] = f"{tokens}/{len(wanted)}"

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
        params = [self.params(i, 0.0, 128) for i in range(44)]
        runs = [hashlib.sha256(repr(self.run(self.fill[:44], params)).encode()).hexdigest()[:8]
                for _ in range(5)]  # fmt: skip
        self.report["bits"]["44 together x5 outcomes"] = len(set(runs))
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

    def times(self, turn: Any) -> None:
        """Throughput of 128 × (512 in + 128 out) and one stream of 128 tokens, in turns."""
        import torch

        throughput, latency = [], []
        params = [self.params(i, 1.0, 128) for i in range(128)]
        for lap in range(self.args.rounds + 1):
            with turn(lap):
                self.llm.reset_prefix_cache()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                self.llm.generate(self.big, params, use_tqdm=False)
                middle = time.perf_counter()
                self.llm.generate([self.big[0]], [params[0]], use_tqdm=False)
                end = time.perf_counter()
            if lap:  # the first lap warms up
                throughput.append(128 * 128 / (middle - begin))
                latency.append((end - middle) / 128 * 1e3)
        self.report["tok_s"], self.report["ms_per_token"] = throughput, latency


class Turns:
    """Engines on one GPU take turns: `turn(lap)` waits for this one's place in lap."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.at = 0

    def mark(self, name: str) -> None:
        if self.args.sync:
            (Path(self.args.sync) / name).touch()

    def wait(self, names: list[str], limit_s: float = 400) -> None:
        until = time.time() + limit_s
        while self.args.sync and time.time() < until:
            if all((Path(self.args.sync) / n).exists() for n in names):
                return
            time.sleep(0.05)

    def __call__(self, lap: int) -> Turns:
        self.at = lap * self.args.peers + self.args.index
        return self

    def __enter__(self) -> None:
        if self.at:
            self.wait([f"turn{self.at - 1}"])

    def __exit__(self, *_: object) -> None:
        self.mark(f"turn{self.at}")


def environment(mode: str) -> None:
    """What makes a mode, before anything is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_BATCH_INVARIANT"] = "0" if mode == "stock" else "1"
    if mode == "ours":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["VLLM_PLUGINS"] = "samebits" if mode == "ours" else ""


def main() -> None:
    args = arguments()
    environment(args.mode)
    turns = Turns(args)
    bench: Bench | None = None
    try:
        bench = Bench(args)
        print(args.mode, f"started in {bench.report['start_s']:.0f} s", flush=True)
        if args.mode == "ours":
            bench.report["checks"] = check_ops()
            print(bench.report["checks"]["checks"], flush=True)
        if not args.no_bits:
            bench.bits()
            print(args.mode, bench.report["bits"], flush=True)
    except Exception:
        import traceback

        traceback.print_exc()
    turns.mark(f"ready{args.index}")
    turns.wait([f"ready{i}" for i in range(args.peers)])
    if bench is None:
        for lap in range(args.rounds + 1):
            with turns(lap):
                pass
        return
    if not args.no_times:
        bench.times(turns)
    Path(args.out).write_text(json.dumps(bench.report, default=str))
    print(args.mode, {k: bench.report.get(k) for k in ("tok_s", "ms_per_token")}, flush=True)


def check_ops() -> dict[str, Any]:
    """The start's self-check in this process, which is the worker too."""
    from ops import registry

    begin = time.time()
    found = registry.report(True)
    found["elapsed_s"] = time.time() - begin
    return found


if __name__ == "__main__":
    main()
