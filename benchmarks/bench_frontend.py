"""What HTTP and text cost in an API process: CPU time per request and per streamed token, whole and by part.

    python benchmarks/bench_frontend.py [--concurrency 1 32 256] [--vllm PYTHON] [--sglang PYTHON]

*Whole*: a real API process over a stub engine in this process, which replays token ids at a pace that leaves each
token a chunk of its own. Chat completions are streamed over HTTP, once with 1 and once with ``--tokens`` output
tokens; the process's CPU time (all its threads, from the kernel's scheduler) gives the cost of a request and of a
token. *Parts*: single-threaded, in this process: parsing the body, template, tokenizing, detokenizing, encoding
the events.

``--vllm`` and ``--sglang`` name the Pythons of environments where those are installed: their own front-end code is
driven with the same tokenizer, prompts and token ids (see vllm_frontend.py and sglang_frontend.py for what of it).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from frontend_stub import StubServer, stub_server
from http_stream import Endpoint
from local_server import free_port
from serving_load import Target, Workload, fixed_prompts, run_streams

from fastengine.config import ModelConfig
from fastengine.entrypoints import request_body
from fastengine.entrypoints.openai.chat import ChatEvents
from fastengine.entrypoints.openai.chat_job import ChatJob, prepare_chat
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest
from fastengine.frontend.request_manager import SequenceUpdate
from fastengine.frontend.text_service import ModelText, TextService, load_model_text
from fastengine.frontend.text_stream import SequenceText, TextUpdate
from fastengine.ipc.process import tied_to_parent
from fastengine.text.fast_tokenizer import FastTokenizer
from fastengine.text.output_text import OutputText

HERE = Path(__file__).parent
DEFAULT_MODEL = Path.home() / ".cache/fastengine/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_WORDS = 64
PARTS = ("parse body", "template", "tokenize", "detokenize", "encode SSE")
PEER_START_S = 120.0
# A step of the stub takes this long: no process here is then so busy that tokens have to share a chunk.
PACE_MS_PER_STREAM, LEAST_PACE_MS = 0.3, 2.0


def process_cpu_s(pid: int) -> float:
    """CPU seconds of all its threads, which must have been there from the beginning to the end of what is measured."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def run(server: StubServer, streams: int, rounds: int, tokens: int) -> tuple[float, float]:
    """(CPU seconds in the API process, tokens per chunk)"""
    target = Target("server", Endpoint.parse(server.url), "default")
    workload = Workload("chat", tokens, True, {}, {"Content-Type": "application/json"}, 300.0)
    prompts = [list(itertools.islice(fixed_prompts(stream, PROMPT_WORDS), rounds)) for stream in range(streams)]
    before = process_cpu_s(server.pid)
    summary = asyncio.run(run_streams(target, workload, prompts, tokens))
    used = process_cpu_s(server.pid) - before
    if summary.failures:
        raise SystemExit(f"{summary.failures} requests failed: {summary.errors}")
    return used, summary.tokens_per_chunk


def measure(name: str, server: StubServer, streams: int, requests: int, tokens: int) -> str:
    """A row of the table: what a request costs by itself, and what each token adds."""
    pace_ms = max(LEAST_PACE_MS, PACE_MS_PER_STREAM * streams)
    if server.engine is not None:
        server.engine.step_s = pace_ms / 1000
    else:
        urllib.request.urlopen(f"{server.url}/health?step_ms={pace_ms}").close()
    rounds = max(1, requests // streams)
    run(server, streams, 1, 2)  # warm-up
    short, _ = run(server, streams, rounds, 1)
    whole, per_chunk = run(server, streams, rounds, tokens)
    count = rounds * streams
    per_token = (whole - short) / (count * (tokens - 1))
    return f"| {name} | {streams} | {(short / count - per_token) * 1e6:.0f} | {per_token * 1e6:.1f} | {per_chunk:.2f} |"


def cpu_us(times: int, work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) / times * 1e6


def own_parts(text: ModelText, token_ids: list[int], streams: int, tokens: int) -> dict[str, float]:
    prompt = next(fixed_prompts(0, PROMPT_WORDS))
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True}).encode()
    times = 2000

    def parse() -> ChatCompletionRequest:
        return request_body.parse(request_body.decode_object(body), ChatCompletionRequest, strict=False).value

    template, tokenizer = text.chat_template, text.tokenizer
    assert template is not None
    messages = [{"role": "user", "content": prompt}]
    rendered = template.render(messages)
    job = asyncio.run(_job(text, parse()))
    updates = _updates(job, text, token_ids, tokens)
    return {
        "parse body": cpu_us(times, lambda: [parse() for _ in range(times)]),
        "template": cpu_us(times, lambda: [template.render(messages) for _ in range(times)]),
        "tokenize": cpu_us(times, lambda: [tokenizer.with_one_bos(tokenizer.encode(rendered)) for _ in range(times)]),
        "detokenize": cpu_us(streams * tokens, lambda: [_updates(job, text, token_ids, tokens) for _ in range(streams)]),
        "encode SSE": cpu_us(streams * tokens, lambda: [_encode(job, text, updates) for _ in range(streams)]),
    }


async def _job(text: ModelText, request: ChatCompletionRequest) -> ChatJob:
    service = TextService(lambda: text)
    service.start()
    await service.ready()
    try:
        return await prepare_chat(service, text, request, request_id="chatcmpl-1", model="default")
    finally:
        service.close()


class _Sequences:
    """What an event writer looks at of a stream."""

    def __init__(self, job: ChatJob, text: ModelText):
        output = OutputText(text.tokenizer, job.prompts[0].token_ids, job.sampling)
        self.sequences = [SequenceText(0, output, min_tokens_per_update=1)]


def _updates(job: ChatJob, text: ModelText, token_ids: list[int], tokens: int) -> list[TextUpdate]:
    """A sequence's tokens, each by itself, through the same code as in a server."""
    (sequence,) = _Sequences(job, text).sequences
    found = []
    for position in range(tokens):
        last = position == tokens - 1
        token = token_ids[position % len(token_ids)]
        found.append(sequence.take(SequenceUpdate(index=0, token_ids=[token], finish_reason="length" if last else None)))
    return [update for update in found if update is not None]


def _encode(job: ChatJob, text: ModelText, updates: list[TextUpdate]) -> int:
    events = ChatEvents(job, text, _Sequences(job, text))  # type: ignore[arg-type]
    return sum(len(b"".join(events.of(update))) for update in updates)


# --- peers ---------------------------------------------------------------------------------------


def export_tokenizer(text: ModelText, directory: Path) -> None:
    """The same tokenizer in Hugging Face layout, for peers."""
    tokenizer = text.tokenizer
    if not isinstance(tokenizer, FastTokenizer):
        raise SystemExit("--vllm and --sglang need a model whose tokenizer is one of the tokenizers library")
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_templates["default"], **tokenizer.special_tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@contextlib.contextmanager
def vllm_server(python: str, directory: Path, ids_file: Path) -> Iterator[StubServer]:
    port = free_port()
    command = [python, str(HERE / "vllm_frontend.py"), str(directory), str(ids_file), str(port), "2"]
    process = subprocess.Popen(tied_to_parent(command))
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PEER_START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url + "/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("vLLM's front end did not start")
            time.sleep(0.2)
        yield StubServer(url, process.pid)
    finally:
        process.terminate()
        process.wait()


def peer_parts(python: str, script: str, directory: Path, ids_file: Path) -> dict[str, float]:
    output = subprocess.run([python, str(HERE / script), str(directory), str(ids_file)], stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="whose tokenizer and template are used")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 256], help="numbers of streams")
    parser.add_argument("--requests", type=int, default=40, help="about how many requests are sent at each concurrency")
    parser.add_argument("--tokens", type=int, default=129, help="output tokens per request")
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment with vLLM")
    parser.add_argument("--sglang", metavar="PYTHON", help="the Python of an environment with SGLang")
    args = parser.parse_args()
    text = load_model_text(ModelConfig(model=args.model))
    token_ids = text.tokenizer.encode(" " + next(fixed_prompts(1, 500)))
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.2f}\n")
    with tempfile.TemporaryDirectory() as root:
        directory, ids_file = Path(root), Path(root) / "token_ids.json"
        ids_file.write_text(json.dumps(token_ids))
        if args.vllm or args.sglang:
            export_tokenizer(text, directory)
        print("| front end | streams | CPU us/request | CPU us/token | tokens/chunk |\n|---|---|---|---|---|")
        with contextlib.ExitStack() as stack:
            servers = {"fastengine": stack.enter_context(stub_server(args.model, token_ids))}
            if args.vllm:
                servers["vLLM"] = stack.enter_context(vllm_server(args.vllm, directory, ids_file))
            wait_ready(servers["fastengine"])
            for streams in args.concurrency:
                for name, server in servers.items():
                    print(measure(name, server, streams, args.requests, args.tokens), flush=True)
        rows = {"fastengine": own_parts(text, token_ids, 32, 128)}
        if args.vllm:
            rows["vLLM"] = peer_parts(args.vllm, "vllm_frontend.py", directory, ids_file)
        if args.sglang:
            rows["SGLang"] = peer_parts(args.sglang, "sglang_frontend.py", directory, ids_file)
    print("\nCPU us; the first three per request, the others per token\n")
    print(" ".join(["| front end", *(f"| {part}" for part in PARTS)]) + " |\n" + "|---" * (len(PARTS) + 1) + "|")
    for name, found in rows.items():
        print(" ".join([f"| {name}", *(f"| {found[part]:.1f}" if part in found else "| -" for part in PARTS)]) + " |")


def wait_ready(server: StubServer) -> None:
    deadline = time.monotonic() + PEER_START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(server.url + "/health", timeout=5).close()
            return
        time.sleep(0.1)
    raise SystemExit("the API process did not start")


if __name__ == "__main__":
    main()
