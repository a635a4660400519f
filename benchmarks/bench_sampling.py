"""What sampling adds to a decode step on the CPU, beside greedy decoding of the same batch.

``python benchmarks/bench_sampling.py --model FILE.gguf`` decodes a batch with each kind of request in turn
(greedy, temperature, top-p, penalties, log-probabilities ...), several rounds, and prints medians of the
time of a step and its distance to the greedy one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import paddle

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastengine.config import EngineConfig
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import StartedSequence, StepPlan
from fastengine.protocol.tokens import pack_token_ids
from fastengine.worker.model_host import ModelHost
from fastengine.worker.parallel import TensorParallel

BLOCK_SIZE = 64
CONTEXT = 128
STEPS = 24
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
    "top-k, top-p, min-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.05),
    "penalties": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
    "logit_bias": SamplingParams(temperature=0.8, top_p=0.95, logit_bias={7: 1.0, 9: -1.0}),
    "5 logprobs": SamplingParams(temperature=0.8, top_p=0.95, logprobs=5),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time of a decode step by kind of sampling.")
    parser.add_argument("--model", required=True, help="GGUF file or model directory.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    paddle.set_grad_enabled(False)
    length = CONTEXT + STEPS + BLOCK_SIZE
    config = EngineConfig.from_flags(
        model=args.model, block_size=BLOCK_SIZE, max_num_seqs=max(args.batches), max_model_len=length, cpu_threads=args.threads
    )
    host = ModelHost(config, TensorParallel(), args.threads)
    host.load(lambda share: None)
    host.init_cache(-(-length // BLOCK_SIZE) * max(args.batches), 0)
    print(f"{'batch':>5}  {'kind':22} {'ms/step':>8} {'beside greedy':>14}")
    for batch in args.batches:
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(args.rounds):
            for kind, params in KINDS.items():
                times[kind].append(seconds_per_step(host, batch, params, length))
        greedy = statistics.median(times["greedy"])
        for kind, values in times.items():
            median = statistics.median(values)
            print(f"{batch:5}  {kind:22} {1e3 * median:8.3f} {1e3 * (median - greedy):+11.3f} ms")
    return 0


def seconds_per_step(host: ModelHost, batch: int, params: SamplingParams, length: int) -> float:
    """Of ``batch`` sequences that decode after prompts of CONTEXT tokens."""
    rng = np.random.default_rng(batch)
    blocks = -(-length // BLOCK_SIZE)
    host.step(StepPlan(step_id=0, released=pack_token_ids(range(host.config.scheduler.max_num_seqs))))
    for slot in range(batch):
        sequence = StartedSequence(
            slot=slot,
            token_ids=pack_token_ids(rng.integers(0, host.spec.vocab_size, CONTEXT).tolist()),
            num_prompt=CONTEXT,
            num_computed=0,
            block_ids=pack_token_ids(range(slot * blocks, (slot + 1) * blocks)),
            sampling=params,
            seed=slot,
            request_id=f"bench-{slot}",
        )
        chunk = {"chunk_slots": [slot], "chunk_starts": [0], "chunk_lengths": [CONTEXT]}
        host.step(StepPlan(step_id=0, started=[sequence], **{name: pack_token_ids(values) for name, values in chunk.items()}))
    decodes = StepPlan(step_id=0, decodes=pack_token_ids(range(batch)))
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        host.step(decodes)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
