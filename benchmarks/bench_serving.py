"""Load an OpenAI-compatible server with streams and measure what a client sees.

Closed loop: ``--concurrency`` streams, each sending its next request when the last one has ended; with ``--turns``
streams hold conversations, whose every turn sends all earlier ones again. With
several ``--url`` the servers are measured in turn (A B A B ...) on the same prompts, and the tables give
medians over the rounds and ratios to the first. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from http_stream import Connection, Endpoint, HttpProtocolError, HttpStatusError
from serving_load import RequestRecord, Summary, Target, Workload, file_prompts, fixed_prompts, run_conversations, run_streams, seed_of, send_request

MEASURES = ("output_tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p50", "itl_p99", "e2e_p50", "e2e_p99")


async def words_for_tokens(target: Target, workload: Workload, input_tokens: int) -> int:
    """How many words make a prompt of ``input_tokens`` tokens, template included, by the server's own count.

    Raises SystemExit when the server does not answer; without usage in its answers a word counts as a token.
    """
    num_words = input_tokens
    for attempt in range(4):
        prompt = next(fixed_prompts(attempt, num_words))
        record = await probe(target, workload, prompt, max_tokens=1)
        if record.usage is None or record.usage.prompt_tokens == input_tokens:
            break
        num_words += input_tokens - record.usage.prompt_tokens
        if num_words < 1:
            raise SystemExit(f"{target.name}: what is before the prompt takes more than --input-tokens {input_tokens}")
    return num_words


async def probe(target: Target, workload: Workload, prompt: str, max_tokens: int) -> RequestRecord:
    connection = Connection(target.endpoint, workload.headers)
    record = await send_request(connection, workload, workload.body(target.model, prompt, max_tokens))
    await connection.close()
    # One token may be half a character: no output then, and nothing wrong.
    if record.error and record.usage is None:
        raise SystemExit(f"{target.name}: a first request failed: {record.error}")
    return record


async def find_target(name: str, url: str, model: str | None, headers: dict[str, str]) -> Target:
    endpoint = Endpoint.parse(url)
    if model is None:
        connection = Connection(endpoint, headers)
        try:
            model = json.loads(await connection.fetch("GET", "/v1/models"))["data"][0]["id"]
        except (OSError, HttpStatusError, HttpProtocolError, ValueError, LookupError) as error:
            raise SystemExit(f"{name}: GET {url}/v1/models: {error}; is the server up? (or give --model)") from None
        finally:
            await connection.close()
    return Target(name, endpoint, model)


# --- the run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    target: str
    concurrency: int
    round: int
    summary: Summary
    turns: list[Summary] = field(default_factory=list)  # of each turn of the conversations; none without --turns


async def run(args: argparse.Namespace, log: Callable[[str], None]) -> list[Cell]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {args.api_key}"} if args.api_key else {})
    system = next(fixed_prompts(seed_of(args.seed, "system"), args.system_words)) if args.system_words else ""
    workload = Workload(args.api, args.output_tokens, args.ignore_eos, args.extra_body, headers, args.timeout, system)
    targets = [await find_target(name, url, args.model, headers) for name, url in args.url]
    conversations = await conversation_source(args, targets[0], workload)
    cells = []
    for concurrency in args.concurrency:
        if args.warmup:
            for target in targets:
                first_turns = (turns[0] for turns in conversations(f"warmup {concurrency}"))
                await run_streams(target, workload, [[next(first_turns)] for _ in range(concurrency)], min(16, args.output_tokens))
        for round_index in range(args.rounds):
            source = conversations(f"{concurrency} {round_index}")
            prompts = [[next(source) for _ in range(args.requests_per_stream)] for _ in range(concurrency)]
            for target in targets:
                summary, turns = await run_conversations(target, workload, prompts, args.output_tokens)
                cells.append(Cell(target.name, concurrency, round_index, summary, turns if args.turns > 1 else []))
                log(
                    f"{target.name}: {concurrency} streams, round {round_index + 1} of {args.rounds}: "
                    f"{summary.output_tokens_per_s:.1f} tokens/s, {summary.failures} of {summary.requests} failed"
                )
                for error in summary.errors:
                    log(f"    {error}")
    return cells


async def conversation_source(args: argparse.Namespace, target: Target, workload: Workload) -> Callable[[str], Iterator[list[str]]]:
    """A function from a label (of one measured run) to that run's conversations, each what its user says turn by turn: the same for every target."""
    if args.dataset not in ("fixed", "repeated"):
        lines = [line for line in Path(args.dataset).read_text().splitlines() if line.strip()]
        if not lines:
            raise SystemExit(f"--dataset {args.dataset}: no prompts in it")
        return lambda label: grouped(file_prompts(lines, seed_of(args.seed, label)), args.turns)
    num_words = await words_for_tokens(target, workload, args.input_tokens)

    def fixed(seed: int) -> Iterator[list[str]]:
        later = grouped(fixed_prompts(seed_of(seed, "later turns"), args.turn_words or num_words), args.turns - 1)
        return ([first, *rest] for first, rest in zip(fixed_prompts(seed, num_words), later, strict=True))

    if args.dataset == "fixed":
        return lambda label: fixed(seed_of(args.seed, label))
    conversation = next(fixed(args.seed))
    return lambda label: itertools.repeat(conversation)


def grouped(prompts: Iterator[str], size: int) -> Iterator[list[str]]:
    """Endless lists of ``size``."""
    while True:
        yield list(itertools.islice(prompts, size))


# --- the report -------------------------------------------------------------------------------


Row = dict[str, float]


def medians(summaries: list[Summary]) -> Row:
    """Of what was measured in several rounds; counts are sums."""
    numbers = (*MEASURES, "client_cpu_us_per_token", "tokens_per_chunk", "cached_prompt_share")
    out = {name: statistics.median(getattr(s, name) for s in summaries) for name in numbers}
    out["requests"] = sum(s.requests for s in summaries)
    out["failures"] = sum(s.failures for s in summaries)
    out["client_cpu_percent"] = statistics.median(100 * s.client_cpu_s / s.wall_s for s in summaries)
    prompt_tokens = sum(s.prompt_tokens for s in summaries)
    out["prompt_tokens_each"] = prompt_tokens / (out["requests"] - out["failures"]) if prompt_tokens else math.nan
    return out


def markdown(cells: list[Cell]) -> str:
    """The tables: one row per target and concurrency, then those of each turn, and with several targets ratios to the first."""
    levels = list(dict.fromkeys(c.concurrency for c in cells))
    targets = list(dict.fromkeys(c.target for c in cells))
    own = {(target, level): [c for c in cells if (c.target, c.concurrency) == (target, level)] for level in levels for target in targets}
    rows = {key: medians([c.summary for c in found]) for key, found in own.items()}
    lines = overview(rows)
    if cells[0].turns:
        turns = {key: [medians(list(turn)) for turn in zip(*(c.turns for c in found), strict=True)] for key, found in own.items()}
        lines += ["", *table_of_turns(turns)]
    if len(targets) > 1:
        lines += ["", f"Relative to {targets[0]}:", "", *ratios(rows, targets[0])]
    return "\n".join(lines)


def overview(rows: dict[tuple[str, int], Row]) -> list[str]:
    lines = [
        "| server | streams | output tokens/s | TTFT ms p50 / p99 | per token ms p50 / p99 | between chunks ms p50 / p99, tokens a chunk "
        "| whole ms p50 / p99 | prompt cached | failed | client CPU |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (target, level), m in rows.items():
        lines.append(
            f"| {target} | {level} | {m['output_tokens_per_s']:.1f} | {latencies(m)} "
            f"| {m['e2e_p50']:.0f} / {m['e2e_p99']:.0f} | {cached_share(m)} | {m['failures']:.0f} of {m['requests']:.0f} "
            f"| {m['client_cpu_percent']:.0f} % of a core, {m['client_cpu_us_per_token']:.0f} us/token |"
        )
    return lines


def table_of_turns(rows: dict[tuple[str, int], list[Row]]) -> list[str]:
    lines = [
        "| server | streams | turn | prompt tokens | prompt cached | TTFT ms p50 / p99 | per token ms p50 / p99 | between chunks ms p50 / p99, tokens a chunk "
        "| output tokens/s of a stream | failed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (target, level), turns in rows.items():
        for number, m in enumerate(turns, 1):
            prompt = "not told" if math.isnan(m["prompt_tokens_each"]) else f"{m['prompt_tokens_each']:.0f}"
            lines.append(
                f"| {target} | {level} | {number} | {prompt} | {cached_share(m)} | {latencies(m)} "
                f"| {m['output_tokens_per_s']:.1f} | {m['failures']:.0f} of {m['requests']:.0f} |"
            )
    return lines


def latencies(m: Row) -> str:
    return (
        f"{m['ttft_p50']:.1f} / {m['ttft_p99']:.1f} | {m['tpot_p50']:.2f} / {m['tpot_p99']:.2f} "
        f"| {m['itl_p50']:.2f} / {m['itl_p99']:.2f}, {m['tokens_per_chunk']:.1f}"
    )


def cached_share(m: Row) -> str:
    return "not told" if math.isnan(m["cached_prompt_share"]) else f"{m['cached_prompt_share']:.0%}"


def ratios(rows: dict[tuple[str, int], Row], first: str) -> list[str]:
    lines = ["| server | streams | output tokens/s | TTFT p50 | per token p50 |", "|---|--:|--:|--:|--:|"]
    for (target, level), m in rows.items():
        if target != first:
            base = rows[first, level]
            relative = (f"{m[name] / (base[name] or math.nan):.2f}" for name in ("output_tokens_per_s", "ttft_p50", "tpot_p50"))
            lines.append(f"| {target} | {level} | {' | '.join(relative)} |")
    return lines


def machine() -> dict[str, Any]:
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "load_average": os.getloadavg(), "python": platform.python_version()}


# --- the command line -------------------------------------------------------------------------


def named_url(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    name, url = (name, url) if separator and "/" not in name else (text, text)
    try:
        Endpoint.parse(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, url


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure OpenAI-compatible servers with streaming requests.", allow_abbrev=False)
    add = parser.add_argument
    add("--url", type=named_url, action="append", required=True, metavar="[NAME=]URL", help="A server; repeat to compare several in turn.")
    add("--model", help="Model name to send; default: the first of GET /v1/models.")
    add("--api", choices=("chat", "completions"), default="chat", help="Endpoint to call. Default: chat.")
    add("--api-key", help="Sent as 'Authorization: Bearer KEY'.")
    add("--concurrency", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="Numbers of streams. Default: 1 8 32.")
    add("--requests-per-stream", type=positive, default=4, metavar="N", help="Or conversations, with --turns. Default: 4.")
    add("--turns", type=positive, default=1, metavar="N", help="Turns of a conversation: each request becomes N, one after the other. Default: 1.")
    add(
        "--turn-words",
        type=positive,
        metavar="N",
        help="Words of the user's text from the second turn on (fixed and repeated). Default: as in the first.",
    )
    add(
        "--input-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="Length of the (first) prompt, template included (fixed and repeated). Default: 64.",
    )
    add("--system-words", type=int, default=0, metavar="N", help="Begin each chat with the same system message of N words. Default: 0, none.")
    add("--output-tokens", type=positive, default=64, metavar="N", help="max_tokens of every request. Default: 64.")
    add("--ignore-eos", action="store_true", help="Send ignore_eos, for servers that take it, so that every answer has its full length.")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="More fields for every request's body.")
    add(
        "--dataset",
        default="fixed",
        metavar="{fixed,repeated,FILE}",
        help="fixed: seeded word prompts, all different; repeated: one prompt, or conversation; or a file, a prompt or turn a line.",
    )
    add("--seed", type=int, default=0, help="Of the prompts. Default: 0.")
    add("--rounds", type=positive, metavar="N", help="Times each measurement is made. Default: 1, with several servers 3.")
    add("--warmup", action=argparse.BooleanOptionalAction, default=True, help="A short unmeasured run before each number of streams. Default: on.")
    add("--timeout", type=float, default=600.0, metavar="S", help="Seconds a request may take. Default: 600.")
    add("--json", type=Path, metavar="OUT", help="Write settings and every round's numbers to this file.")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if len(args.url) > 1 else 1)
    names = [name for name, _ in args.url]
    if len(set(names)) < len(names):
        parser.error("--url: two servers have the same name; write --url NAME=URL")
    if args.system_words and args.api != "chat":
        parser.error("--system-words: only a chat has a system message")
    if args.turn_words and (args.turns == 1 or args.dataset not in ("fixed", "repeated")):
        parser.error("--turn-words: needs --turns above 1, and prompts that are not read from a file")
    if args.dataset not in ("fixed", "repeated") and not Path(args.dataset).is_file():
        parser.error(f"--dataset: {args.dataset!r} is neither fixed, repeated nor a file")
    return args


def event_loop_run(main: Coroutine[Any, Any, list[Cell]]) -> list[Cell]:
    """``asyncio.run``, on uvloop where it is installed, for a client that takes less CPU time."""
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        return uvloop.run(main)
    return asyncio.run(main)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cells = event_loop_run(run(args, lambda line: print(line, file=sys.stderr, flush=True)))
    print(markdown(cells))
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "api_key"}
        report = {"settings": settings, "machine": machine(), "cells": cells}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 1 if any(c.summary.failures for c in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
