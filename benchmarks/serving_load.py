"""One measured run: streams that send prompts to a server, and what their requests saw."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from http_stream import Connection, Endpoint, HttpProtocolError, HttpStatusError

# Short words that are one token each, with the space before them, in nearly every BPE vocabulary.
WORD_LIST = """time people way water word long little very after thing our just name good sentence man think say great where
help through much before line right too mean old any same tell boy follow came want show also around form three small
set put end does another well large must big even such because turn here why ask went men read need land different home
us move try kind hand picture again change off play air away animal house point page letter mother answer found study
still learn should world high every near add food between own below country plant last school father keep tree never
start city earth eye light thought head under story saw left few while along might close something seem next hard open
example begin life always those both paper together got group often run"""
WORDS = WORD_LIST.split()


@dataclass(frozen=True)
class Target:
    """One server: where it is, and the name it knows its model by."""

    name: str
    endpoint: Endpoint
    model: str


@dataclass(frozen=True)
class Workload:
    api: str  # chat or completions
    output_tokens: int
    ignore_eos: bool
    extra_body: dict[str, Any]
    headers: dict[str, str]
    timeout_s: float
    system: str = ""  # a system message before every prompt of a chat: none if empty

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"

    def body(self, model: str, prompt: str, max_tokens: int, earlier: Sequence[tuple[str, str]] = ()) -> bytes:
        """``earlier``: (prompt, answer) of the conversation's turns so far, which a server gets again with each new one."""
        body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.api == "chat":
            system = [{"role": "system", "content": self.system}] if self.system else []
            before = [{"role": role, "content": text} for turn in earlier for role, text in zip(("user", "assistant"), turn, strict=True)]
            body["messages"] = [*system, *before, {"role": "user", "content": prompt}]
        else:
            body["prompt"] = "".join(f"{asked}{answer}\n" for asked, answer in earlier) + prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | self.extra_body).encode()


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: Delta | None = None

    @property
    def content(self) -> str:
        """What belongs to the answer: no reasoning, no tool calls."""
        return self.text or (self.delta and self.delta.content) or ""

    def has_output(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)))


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that a prefix cache held; None where the server doesn't tell."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


@dataclass
class RequestRecord:
    """What one request did. Times are seconds of ``time.perf_counter()``; ``chunk_times`` has one per chunk with output."""

    sent: float
    chunk_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    usage: Usage | None = None
    error: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer, the first of several."""
        return "".join(self.pieces)

    @property
    def output_tokens(self) -> int:
        """By the server's own count, or one per chunk where it gives none."""
        return self.usage.completion_tokens if self.usage else len(self.chunk_times)


async def send_request(connection: Connection, workload: Workload, body: bytes) -> RequestRecord:
    """One streamed request from sending to ``[DONE]``; a failure is recorded, not raised."""
    record = RequestRecord(time.perf_counter())
    try:
        await asyncio.wait_for(_read_stream(connection, workload, body, record), workload.timeout_s)
    except asyncio.TimeoutError:
        record.error = f"no end within {workload.timeout_s:g} s"
    except (HttpStatusError, HttpProtocolError, OSError, msgspec.DecodeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.ended = time.perf_counter()
    if not record.error and not record.chunk_times:
        record.error = "the stream ended without output"
    return record


async def _read_stream(connection: Connection, workload: Workload, body: bytes, record: RequestRecord) -> None:
    done = False
    async with aclosing(connection.events(workload.path, body)) as events:
        async for read_at, payload in events:
            if payload == b"[DONE]":
                done = True
                continue
            chunk = decode_chunk(payload)
            if chunk.error is not None:
                record.error = f"error event: {str(chunk.error)[:300]}"
            if any(choice.has_output() for choice in chunk.choices):
                record.chunk_times.append(read_at)
                record.pieces += [choice.content for choice in chunk.choices if choice.index == 0]
            if chunk.usage is not None:
                record.usage = chunk.usage
    if not done and not record.error:
        record.error = "the stream ended without [DONE]"


@dataclass(frozen=True)
class Summary:
    """One target at one concurrency in one round, or one turn of it. Latencies in milliseconds."""

    requests: int
    failures: int
    errors: list[str]
    wall_s: float
    prompt_tokens: int
    cached_prompt_share: float  # of the prompt tokens; NaN where the server doesn't tell
    output_tokens: int
    output_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tpot_p50: float  # of each request's mean time per token after the first chunk
    tpot_p99: float
    e2e_p50: float
    e2e_p99: float
    tokens_per_chunk: float
    client_cpu_s: float
    client_cpu_us_per_token: float


def percentile_ms(seconds: list[float], q: float) -> float:
    return float(np.percentile(seconds, q)) * 1e3 if seconds else float("nan")


def summarize(records: list[RequestRecord], wall_s: float, client_cpu_s: float) -> Summary:
    """Latencies and token counts over the requests that succeeded; the failed ones are only counted."""
    good = [r for r in records if not r.error]
    tokens = sum(r.output_tokens for r in good)
    ttft = [r.chunk_times[0] - r.sent for r in good]
    gaps = [later - earlier for r in good for earlier, later in zip(r.chunk_times, r.chunk_times[1:], strict=False)]
    per_token = [(r.chunk_times[-1] - r.chunk_times[0]) / (r.output_tokens - 1) for r in good if r.output_tokens > 1]
    e2e = [r.ended - r.sent for r in good]
    chunks = sum(len(r.chunk_times) for r in good)
    prompt_tokens = sum(r.usage.prompt_tokens for r in good if r.usage)
    cached = [r.usage.cached_tokens for r in good if r.usage and r.usage.cached_tokens is not None]
    return Summary(
        requests=len(records),
        failures=len(records) - len(good),
        errors=sorted({r.error for r in records if r.error})[:5],
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        cached_prompt_share=sum(cached) / prompt_tokens if cached and prompt_tokens else float("nan"),
        output_tokens=tokens,
        output_tokens_per_s=tokens / wall_s,
        ttft_p50=percentile_ms(ttft, 50),
        ttft_p99=percentile_ms(ttft, 99),
        itl_p50=percentile_ms(gaps, 50),
        itl_p99=percentile_ms(gaps, 99),
        tpot_p50=percentile_ms(per_token, 50),
        tpot_p99=percentile_ms(per_token, 99),
        e2e_p50=percentile_ms(e2e, 50),
        e2e_p99=percentile_ms(e2e, 99),
        tokens_per_chunk=tokens / chunks if chunks else float("nan"),
        client_cpu_s=client_cpu_s,
        client_cpu_us_per_token=client_cpu_s / tokens * 1e6 if tokens else float("nan"),
    )


@dataclass(frozen=True)
class TurnRecord:
    turn: int  # from 0
    request: RequestRecord


async def run_conversations(target: Target, workload: Workload, prompts: list[list[list[str]]], max_tokens: int) -> tuple[Summary, list[Summary]]:
    """``len(prompts)`` streams at once, each with its own conversations one after the other: a conversation is what its user says, turn by turn.

    A turn is sent as soon as the one before is answered, with all before it; a failure ends its conversation. Returns the summary of
    everything and one of each turn, whose time is that of its requests added up: its tokens per second are those of one stream.
    """

    async def stream(own: list[list[str]]) -> list[TurnRecord]:
        connection = Connection(target.endpoint, workload.headers)
        try:
            return [record for turns in own for record in await _converse(connection, target, workload, turns, max_tokens)]
        finally:
            await connection.close()

    wall, cpu = time.perf_counter(), time.process_time()
    records = [record for own in await asyncio.gather(*(stream(own) for own in prompts)) for record in own]
    whole = summarize([r.request for r in records], time.perf_counter() - wall, time.process_time() - cpu)
    return whole, [_summarize_turn([r.request for r in records if r.turn == turn]) for turn in range(_most_turns(prompts))]


async def _converse(connection: Connection, target: Target, workload: Workload, turns: list[str], max_tokens: int) -> list[TurnRecord]:
    records: list[TurnRecord] = []
    earlier: list[tuple[str, str]] = []
    for turn, prompt in enumerate(turns):
        record = await send_request(connection, workload, workload.body(target.model, prompt, max_tokens, earlier))
        records.append(TurnRecord(turn, record))
        if record.error:
            break
        earlier.append((prompt, record.text))
    return records


def _most_turns(prompts: list[list[list[str]]]) -> int:
    return max((len(turns) for own in prompts for turns in own), default=0)


def _summarize_turn(records: list[RequestRecord]) -> Summary:
    busy_s = sum(r.ended - r.sent for r in records if not r.error)
    return summarize(records, busy_s or float("nan"), float("nan"))


async def run_streams(target: Target, workload: Workload, prompts: list[list[str]], max_tokens: int) -> Summary:
    """``len(prompts)`` streams at once, each sending its own prompts one after the other, each prompt by itself."""
    return (await run_conversations(target, workload, [[[prompt] for prompt in own] for own in prompts], max_tokens))[0]


# --- prompts ----------------------------------------------------------------------------------


def fixed_prompts(seed: int, num_words: int) -> Iterator[str]:
    """Endless prompts of ``num_words`` words, no two with a common beginning worth caching; the same for the same seed."""
    words = random.Random(seed)
    while True:
        yield " ".join(words.choices(WORDS, k=num_words))


def file_prompts(lines: list[str], seed: int) -> Iterator[str]:
    order = random.Random(seed)
    while True:
        yield from order.sample(lines, len(lines))


def seed_of(seed: int, label: str) -> int:
    return random.Random(f"{seed} {label}").getrandbits(48)
