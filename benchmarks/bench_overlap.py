"""What preparing the next step while the workers run this one gains: the same load with and without ``--no-overlap``.

    python benchmarks/bench_overlap.py [--model PATH] [--concurrency 1 8 32] [--step-ms 5] [--rounds 3]

Two servers that differ in that flag alone run side by side, and rounds of load alternate between them, so that both
see the same machine; the idle one uses no CPU. First with a null model that takes ``--step-ms`` for a step (what
is gained beside an accelerator, where the CPU is free meanwhile), then with ``--model`` (on a CPU, where the engine and
the model share the cores). Output tokens per second of the median round, and the gain.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Sequence

from bench_engine import MODEL, measure, server_flags
from local_server import LocalServer, local_server

WARM_UP_TOKENS = 8


def tokens_per_s(server: LocalServer, streams: int, tokens: int) -> float:
    summary, _ = measure(server, streams, 1, tokens)
    return summary.output_tokens_per_s


def compare(name: str, model: str, flags: Sequence[str], concurrency: Sequence[int], rounds: int, tokens: int) -> None:
    """Print one row for each number of streams."""
    with local_server(model, [*flags]) as overlapping, local_server(model, [*flags, "--no-overlap"]) as waiting:
        for streams in concurrency:
            for server in (overlapping, waiting):
                tokens_per_s(server, streams, WARM_UP_TOKENS)
            pairs = [(tokens_per_s(overlapping, streams, tokens), tokens_per_s(waiting, streams, tokens)) for _ in range(rounds)]
            with_it, without = (statistics.median(column) for column in zip(*pairs, strict=True))
            gains = sorted(100 * (a / b - 1) for a, b in pairs)
            shown = f"{statistics.median(gains):+.1f} % ({gains[0]:+.1f} to {gains[-1]:+.1f})"
            print(f"| {name} | {streams} | {without:.0f} | {with_it:.0f} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a real model; default: the null model alone")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--step-ms", type=float, default=5.0, help="what a step of the null model takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.2f}\n")
    print("| model | streams | --no-overlap tokens/s | default tokens/s | gain, median (least to most) |\n|---|--:|--:|--:|--:|")
    flags = server_flags(max(args.concurrency), args.step_ms)
    compare(f"null, {args.step_ms:g} ms a step", str(MODEL), flags, args.concurrency, args.rounds, args.tokens)
    if args.model:
        flags = ["--max-num-seqs", str(max(args.concurrency)), "--max-model-len", "2048"]
        compare(os.path.basename(args.model), args.model, flags, args.concurrency, args.rounds, args.tokens)


if __name__ == "__main__":
    main()
