"""What everything but the model costs: a null model through engine, IPC, API process and HTTP streaming.

    python benchmarks/bench_engine.py [--concurrency 1 32 256] [--step-ms 20 0] [--tokens 200] [--profile DIR]

Starts a server with ``--load-format null`` (a fixed token, no computing), streams completions from it and
reports tokens per second and the CPU time of the server's processes per streamed token, by role. The load
generator's own CPU time stands apart. What a request costs once is part of it: with 200 tokens it weighs little.

``--step-ms`` is how long the null model takes for a step; one server is started for each. With a real model's pace
every token is a chunk of its own (``tokens/chunk`` says so). With 0 the null model outruns the API process, which then
puts several tokens into a chunk: that row shows the highest throughput, and its time per token flatters.
``--profile`` samples all processes with py-spy at the largest number of streams, at the first of the step times, and
writes where their time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from http_stream import Endpoint
from local_server import LocalServer, local_server
from serving_load import Summary, Target, Workload, fixed_prompts, run_streams

MODEL = Path(__file__).parents[1] / "tests" / "golden" / "llama"
PROMPT_WORDS = 8
SHOWN_ROLES = ("API process", "engine", "worker")
TITLES = (
    "step ms",
    "streams",
    "tokens/s",
    "server CPU us/token",
    "tokens/chunk",
    "server CPU us/chunk",
    *(f"{role} us/token" for role in SHOWN_ROLES),
    "client CPU us/token",
    "TTFT p50 ms",
    "between chunks p50 ms",
    "p99 ms",
)
PROFILE_HZ = 200
PROFILE_LINES = 30


def server_flags(streams: int, step_ms: float) -> list[str]:
    slots = max(64, streams)
    flags = ["--null-step-time", str(step_ms / 1000)]
    flags += ["--load-format", "null", "--max-num-seqs", str(slots), "--max-num-batched-tokens", "8192", "--block-size", "64"]
    return [*flags, "--num-gpu-blocks-override", str(slots * 8)]


def expected_tokens_per_s(streams: int, step_ms: float) -> float:
    """By which a row's number of requests is chosen; without pace, what two cores were seen to do."""
    return streams * 1000 / step_ms if step_ms else min(1200 * streams, 50_000)


def measure(server: LocalServer, streams: int, rounds: int, tokens: int) -> tuple[Summary, dict[str, float]]:
    """One run of ``streams`` streams of ``rounds`` requests each, and the server's CPU seconds in it by role."""
    target = Target("server", Endpoint.parse(server.url), "default")
    workload = Workload("completions", tokens, True, {}, {}, 300.0)
    prompts = [list(itertools.islice(fixed_prompts(stream, PROMPT_WORDS), rounds)) for stream in range(streams)]
    before = server.cpu_s()
    summary = asyncio.run(run_streams(target, workload, prompts, tokens))
    after = server.cpu_s()
    if summary.failures:
        raise SystemExit(f"{summary.failures} requests failed: {summary.errors}")
    return summary, {role: used - before.get(role, 0.0) for role, used in after.items()}


def row(step_ms: float, streams: int, summary: Summary, cpu_s: dict[str, float]) -> str:
    per_token = {role: used / summary.output_tokens * 1e6 for role, used in cpu_s.items()}
    total = sum(per_token.values())
    shown = " | ".join(f"{per_token.get(role, 0.0):.1f}" for role in SHOWN_ROLES)
    latency = f"{summary.ttft_p50:.1f} | {summary.itl_p50:.2f} | {summary.itl_p99:.2f}"
    return (
        f"| {step_ms:g} | {streams} | {summary.output_tokens_per_s:.0f} | {total:.1f} | {summary.tokens_per_chunk:.1f} | {total * summary.tokens_per_chunk:.0f} | {shown} "
        f"| {summary.client_cpu_us_per_token:.1f} | {latency} |"
    )


def profile(server: LocalServer, directory: Path, streams: int, tokens: int) -> None:
    """Sample the processes that do the work under ``streams`` streams; one text file each."""
    with tempfile.TemporaryDirectory() as folder:
        samplers = {}
        for process in server.processes():
            if process.role in SHOWN_ROLES:
                raw = Path(folder) / f"{process.role.replace(' ', '_').lower()}.raw"
                command = ["py-spy", "record", "--pid", str(process.pid), "--rate", str(PROFILE_HZ), "--format", "raw", "--output", str(raw)]
                samplers[raw] = subprocess.Popen([*command, "--duration", "8"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while any(sampler.poll() is None for sampler in samplers.values()):
            measure(server, streams, 1, tokens)
        directory.mkdir(parents=True, exist_ok=True)
        for raw in samplers:
            (directory / f"{raw.stem}_{streams}.txt").write_text(summary_of(raw, streams))


def summary_of(raw: Path, streams: int) -> str:
    """Shares by function: time in it and what it calls, and in itself alone, from py-spy's collapsed stacks."""
    inclusive: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for line in raw.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [shortened(frame) for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        for frame in set(frames):
            inclusive[frame] += int(count)
    total = sum(own.values())
    lines = [f"{raw.stem} at {streams} streams of a null model: {total} samples at {PROFILE_HZ} Hz of threads that ran", ""]
    for title, counts in (("itself and what it calls", inclusive), ("itself", own)):
        lines += [title, *(f"{100 * count / total:6.1f} %  {frame}" for frame, count in counts.most_common(PROFILE_LINES)), ""]
    return "\n".join(lines)


def shortened(frame: str) -> str:
    """Without the line number and the path up to the package."""
    name, _, place = frame.partition(" (")
    return f"{name} ({'/'.join(place.rpartition(':')[0].split('/')[-3:]) or place.rstrip(')')})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="whose tokenizer and limits are used (default: the tests' tiny Llama)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 256], help="numbers of streams")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens per request")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[20.0, 0.0], help="how long the null model takes for a step")
    parser.add_argument("--seconds", type=float, default=6.0, help="about how long each row is measured")
    parser.add_argument("--profile", metavar="DIR", help="where the profiles go; needs py-spy")
    args = parser.parse_args()
    if args.profile and not shutil.which("py-spy"):
        parser.error("--profile: py-spy is not installed (pip install py-spy)")
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.2f}\n")
    print(" ".join(f"| {title}" for title in TITLES) + " |\n" + "|---" * len(TITLES) + "|")
    for step_ms in args.step_ms:
        with local_server(args.model, server_flags(max(args.concurrency), step_ms)) as server:
            for streams in args.concurrency:
                measure(server, streams, 1, 20)  # warm-up
                rounds = max(1, round(args.seconds * expected_tokens_per_s(streams, step_ms) / (streams * args.tokens)))
                print(row(step_ms, streams, *measure(server, streams, rounds, args.tokens)), flush=True)
            if args.profile and step_ms == args.step_ms[0]:
                profile(server, Path(args.profile), max(args.concurrency), args.tokens)


if __name__ == "__main__":
    main()
