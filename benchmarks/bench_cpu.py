"""The CPU step offline: prefill and decode in tokens per second, beside what the machine could do.

``python benchmarks/bench_cpu.py --model FILE.gguf`` measures the machine's read bandwidth and integer
peak and the model in the same run, so that a share of the roofline means something on a shared machine.
``--peers openvino llama.cpp`` installs the named peers into environments of their own and runs them in
turn with fastengine (A B A B): whole answers of 128 tokens to prompts of 64, medians and ratios.
``--http`` measures servers instead: fastengine's, and those of the named peers that have one.
``--isa avx512 avxvnni avx2`` compares the instruction sets of the fused step, in turn, each with its own integer peak.
``--cases``, ``--batches`` and ``--rounds`` keep a run short.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import paddle

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_http import measure_http
from benchmarks.cpu_peer_cases import REPEATS
from benchmarks.cpu_peers import PEERS, Load, PeerUnavailable
from benchmarks.cpu_roofline import Machine, measure_machine
from fastengine import custom_ops
from fastengine.config import DEFAULT_DECODE_RUN_MS, EngineConfig
from fastengine.custom_ops.fused import has_instruction_set
from fastengine.engine.run_length import RunLength
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import StartedSequence, StepPlan
from fastengine.protocol.tokens import pack_token_ids
from fastengine.worker.fused_weights import FusedWeights
from fastengine.worker.memory import rss_bytes
from fastengine.worker.model_host import ModelHost
from fastengine.worker.parallel import TensorParallel
from fastengine.worker.run_cut import no_cut

BLOCK_SIZE = 64
PREFILL_TOKENS = 512
DECODE_STEPS = 64
WARM_UP_STEPS = 4
# Whole answers beside peers: prompt and output tokens.
PEER_PROMPT, PEER_OUTPUT = 64, 128


@dataclass(frozen=True)
class Case:
    """``batch`` sequences; ``context`` 0: their prompts of PREFILL_TOKENS are computed, else one token after ``context`` others."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"decode {self.batch} at {self.context}" if self.context else f"prefill {PREFILL_TOKENS}"


@dataclass(frozen=True)
class Work:
    """Bytes read and integer operations of one step."""

    weight_bytes: int
    kv_bytes: int
    operations: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokens per second of the CPU step, its roofline, and peers.")
    parser.add_argument("--model", required=True, help="GGUF file or model directory.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--decode-run-ms", type=float, default=DEFAULT_DECODE_RUN_MS, help="As the server's; 0: one step a plan.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 4096])
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="Only these rows of the table, such as 'prefill 512' 'decode 8 at 128'.")
    parser.add_argument("--http", action="store_true", help="Measure over HTTP, with --batches streams, instead of offline.")
    parser.add_argument("--input-tokens", type=int, default=64, help="With --http: length of a prompt, template included.")
    parser.add_argument("--system-words", type=int, default=0, help="With --http: begin each chat with the same system message of this many words.")
    parser.add_argument("--rounds", type=int, default=3, help="Each case is measured this often; medians are shown.")
    parser.add_argument(
        "--isa", nargs="+", choices=["avx512", "avxvnni", "avx2"], help="Instruction sets of the fused step, each in turn (default: the best)."
    )
    parser.add_argument("--peers", nargs="*", default=[], choices=sorted(PEERS))
    parser.add_argument("--json", type=Path, help="Write the figures to this file as well.")
    args = parser.parse_args()
    paddle.set_grad_enabled(False)
    if args.isa and (args.http or args.peers):
        parser.error("--isa compares fastengine's own instruction sets offline: not with --http or --peers")
    if args.http:
        requests = ["--input-tokens", str(args.input_tokens), "--system-words", str(args.system_words)]
        measure_http(args.model, args.threads, args.peers, args.rounds, args.batches, requests)
        return 0
    cases = [Case(1, 0), *(Case(batch, context) for context in args.contexts for batch in args.batches)]
    cases = [case for case in cases if not args.cases or case.name in args.cases]
    benches = [
        Bench(args.model, args.quantization, args.kv_cache_dtype, args.threads, max(args.batches), max(args.contexts), args.decode_run_ms, isa)
        for isa in args.isa or [""]
    ]
    print(f"{benches[0].description}; load average {os.getloadavg()[0]:.1f}; resident memory after loading {rss_bytes() >> 20} MiB")
    rounds: list[list[Round]] = [[] for _ in benches]
    for _ in range(args.rounds if cases else 0):
        for bench, found in zip(benches, rounds, strict=True):
            found.append(measure_round(bench, cases, args.threads))
    for bench, found in zip(benches, rounds, strict=True):
        print_table(cases, found, bench)
    print(f"peak resident memory {peak_rss_bytes() >> 20} MiB, now {rss_bytes() >> 20} MiB")
    peers = compare_with_peers(args, benches[0]) if args.peers else {}
    if args.json:
        own = [
            {"isa": bench.isa, "machine": asdict(one.machine), "tokens_per_s": one.tokens_per_s}
            for bench, found in zip(benches, rounds, strict=True)
            for one in found
        ]
        args.json.write_text(json.dumps({"fastengine": own, "peers": peers}, indent=1))
    return 0


@dataclass(frozen=True)
class Round:
    """Every case once, and what the machine could do just before."""

    machine: Machine
    tokens_per_s: dict[str, float]


class Bench:
    """One loaded model; every case starts its sequences anew. ``isa``: the fused step's instruction set, empty for the best."""

    def __init__(
        self,
        model: str,
        quantization: str,
        kv_cache_dtype: str,
        threads: int,
        max_batch: int,
        max_context: int,
        decode_run_ms: float = DEFAULT_DECODE_RUN_MS,
        isa: str = "",
    ):
        """``decode_run_ms``: decodes are made in the runs that the server would plan."""
        if isa and not force_isa(isa):
            raise SystemExit(f"this processor cannot run {isa}, or the operators were built without it")
        length = max(max_context, PREFILL_TOKENS, PEER_PROMPT + PEER_OUTPUT) + DECODE_STEPS + WARM_UP_STEPS + BLOCK_SIZE
        self._config = EngineConfig.from_flags(
            model=model,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_batch,
            max_num_batched_tokens=max(2048, max_batch),
            max_model_len=length,
            cpu_threads=threads,
        )
        self._host = ModelHost(self._config, TensorParallel(), threads)
        self._host.load(lambda share: None)
        self._run_length = RunLength(decode_run_ms, max_batch)
        self._cut = no_cut()
        self._blocks_per_sequence = -(-length // BLOCK_SIZE)
        self._host.init_cache(self._blocks_per_sequence * max_batch, 0)

    @property
    def isa(self) -> str:
        """What the fused step runs, ``none`` without one."""
        return self._host.compiled_ops().get("fused_step", "none").split()[0]

    @property
    def arena(self) -> np.ndarray:
        """The largest piece of weights, bytes."""
        storage = max(self._host.weights.storages(), key=lambda storage: storage.nbytes)
        return storage.bits(tuple(slice(None) for _ in storage.shape)).reshape(-1).view(np.uint8)

    @property
    def description(self) -> str:
        weights = sum(storage.nbytes for storage in self._host.weights.storages())
        return f"{self._host.compute_plan.reason}; KV {self._host.kv_shape().dtype}; weights {weights / 1e6:.0f} MB"

    def tokens_per_s(self, case: Case) -> float:
        if case.context == 0:
            started = time.perf_counter()
            self._start(1, PREFILL_TOKENS)
            return PREFILL_TOKENS / (time.perf_counter() - started)
        self._start(case.batch, case.context)
        slots = list(range(case.batch))
        self._decode(slots, WARM_UP_STEPS)
        started = time.perf_counter()
        self._decode(slots, DECODE_STEPS)
        return case.batch * DECODE_STEPS / (time.perf_counter() - started)

    def whole_run(self, batch: int, context: int, steps: int) -> float:
        """Output tokens per second of ``batch`` answers of ``steps`` tokens, their prompts included."""
        started = time.perf_counter()
        self._start(batch, context)  # yields the first token
        self._decode(list(range(batch)), steps - 1)
        return batch * steps / (time.perf_counter() - started)

    def work(self, case: Case) -> Work:
        """What a step must read and compute, whoever computes it in this layout."""
        spec, kv = self._host.spec, self._host.kv_shape()
        tokens, sampled = (case.batch, case.batch) if case.context else (PREFILL_TOKENS, 1)
        context = case.context + WARM_UP_STEPS + DECODE_STEPS // 2 if case.context else PREFILL_TOKENS // 2
        q, kv_width = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        per_layer = spec.hidden_size * (2 * q + 2 * kv_width + 3 * spec.intermediate_size)
        head = spec.hidden_size * spec.vocab_size * sampled
        linear = spec.num_hidden_layers * per_layer * tokens + head
        attention = spec.num_hidden_layers * 2 * q * context * tokens
        kv_bytes = kv.bytes_per_block // BLOCK_SIZE * context * sampled
        return Work(self._weight_bytes(sampled), kv_bytes, 2 * (linear + attention))

    def _weight_bytes(self, num_greedy: int) -> int:
        weights = self._host.weights
        return weights.model.bytes_read(num_greedy) if isinstance(weights, FusedWeights) else sum(storage.nbytes for storage in weights.storages())

    def _start(self, batch: int, length: int) -> None:
        """Fill ``batch`` slots with prompts of ``length`` tokens, one prompt per step."""
        rng = np.random.default_rng(length)
        self._host.step(StepPlan(step_id=0, released=pack_token_ids(range(self._config.scheduler.max_num_seqs))))
        for slot in range(batch):
            first = slot * self._blocks_per_sequence
            sequence = StartedSequence(
                slot=slot,
                token_ids=pack_token_ids(rng.integers(0, self._host.spec.vocab_size, length).tolist()),
                num_prompt=length,
                num_computed=0,
                block_ids=pack_token_ids(range(first, first + self._blocks_per_sequence)),
                sampling=SamplingParams(temperature=0.0),
                seed=0,
                request_id=f"bench-{slot}",
            )
            chunk = {"chunk_slots": [slot], "chunk_starts": [0], "chunk_lengths": [length]}
            self._host.step(StepPlan(step_id=0, started=[sequence], **{name: pack_token_ids(values) for name, values in chunk.items()}))

    def steps_a_plan(self, case: Case) -> int:
        """How many steps of ``case`` the server would plan at once, by the latest measurement."""
        return self._run_length.most_steps(case.batch) if case.context else 1

    def _decode(self, slots: list[int], num_steps: int) -> None:
        decodes = pack_token_ids(slots)
        while num_steps:
            count = min(num_steps, self._run_length.most_steps(len(slots)))
            for result in self._host.steps(StepPlan(step_id=0, decodes=decodes, num_steps=count), self._cut):
                self._run_length.observe(len(slots), result.num_steps, result.forward_us + result.sample_us)
            num_steps -= count


def measure_round(bench: Bench, cases: list[Case], threads: int) -> Round:
    if bench.isa != "none":
        force_isa(bench.isa)  # the peak is its own
    return Round(measure_machine(threads, bench.arena), {case.name: bench.tokens_per_s(case) for case in cases})


def force_isa(name: str) -> bool:
    """Use it for what is loaded from now on, also where CPUID hides it; False if this processor or library lacks it."""
    library = custom_ops._loaded
    return library is not None and library.force_isa(name) and has_instruction_set(library.handle, name)


def print_table(cases: list[Case], rounds: list[Round], bench: Bench) -> None:
    """Medians over the rounds; a share is of the roofline of the same round.

    ``next``: what the other resource would allow; ``run``: decode steps in one plan, as in a server.
    """
    for one in rounds:
        machine = one.machine
        print(f"{bench.isa}: reads the weights at {machine.bytes_per_s / 1e9:.1f} GB/s, integer peak {machine.operations_per_s / 1e9:.0f} Gop/s")
    print(f"{'case':18} {'tok/s':>8} {'best':>8} {'MB read':>8} {'Gop':>7} {'roofline':>9} {'reached':>8}  {'limit':10} {'next':>7} {'run':>4}")
    for case in cases:
        work = bench.work(case)
        tokens = case.batch if case.context else PREFILL_TOKENS
        num_bytes = work.weight_bytes + work.kv_bytes
        found = [one.tokens_per_s[case.name] for one in rounds]
        reading = [tokens * one.machine.bytes_per_s / num_bytes for one in rounds]
        computing = [tokens * one.machine.operations_per_s / work.operations for one in rounds]
        shares = [value / min(pair) for value, *pair in zip(found, reading, computing, strict=True)]
        limits = sorted([(statistics.median(reading), "bandwidth"), (statistics.median(computing), "compute")])
        print(
            f"{case.name:18} {statistics.median(found):8.0f} {max(found):8.0f} {num_bytes / 1e6:8.0f} {work.operations / 1e9:7.1f} "
            f"{limits[0][0]:9.0f} {statistics.median(shares):8.0%}  {limits[0][1]:10} {limits[1][0]:7.0f} {bench.steps_a_plan(case):4}"
        )


def compare_with_peers(args: argparse.Namespace, bench: Bench) -> dict[str, dict[str, float | str]]:
    """fastengine and each peer in turn, ``args.rounds`` times, each the best of its tries; figures of the same shape for both, or why there are none."""
    results: dict[str, dict[str, list[float]]] = {}
    reasons: dict[str, str] = {}
    peaks: dict[str, int] = {}
    load = Load(args.model, args.threads, PREFILL_TOKENS, PEER_PROMPT, PEER_OUTPUT, args.batches)
    for name in args.peers:
        try:
            PEERS[name].install()
        except PeerUnavailable as reason:
            reasons[name] = str(reason)
    for _ in range(args.rounds):
        for batch in args.batches:
            measured = max(bench.whole_run(batch, PEER_PROMPT, PEER_OUTPUT) for _ in range(REPEATS))
            results.setdefault(f"answers {batch}", {}).setdefault("fastengine", []).append(measured)
        prefill = max(bench.tokens_per_s(Case(1, 0)) for _ in range(REPEATS))
        results.setdefault("prefill", {}).setdefault("fastengine", []).append(prefill)
        for name in [name for name in args.peers if name not in reasons]:
            try:
                figures = PEERS[name].run(load)
            except PeerUnavailable as reason:
                reasons[name] = str(reason)
                continue
            peaks[name] = max(peaks.get(name, 0), figures.peak_rss_bytes)
            for key, value in figures.tokens_per_s.items():
                results.setdefault(key, {}).setdefault(name, []).append(value)
    medians: dict[str, dict[str, float | str]] = {}
    for key, row in results.items():
        own = statistics.median(row["fastengine"])
        medians[key] = {name: statistics.median(values) for name, values in row.items()}
        cells = "  ".join(f"{name} {statistics.median(values):8.0f} (x{own / statistics.median(values):.2f})" for name, values in row.items())
        print(f"{key:12} {cells}")
    for name, peak in {"fastengine": peak_rss_bytes(), **peaks}.items():
        print(f"{name}: peak resident memory {peak >> 20} MiB")
    for name, reason in reasons.items():
        print(f"{name}: not measured: {reason}")
    return medians | {"not measured": dict(reasons)}


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM line")


if __name__ == "__main__":
    sys.exit(main())
