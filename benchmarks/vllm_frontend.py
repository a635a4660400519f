"""vLLM's front end over a stub engine that replays token ids, for bench_frontend.py; needs vLLM to be importable.

    python vllm_frontend.py TOKENIZER_DIR TOKEN_IDS.json PORT STEP_MS     serve, pace in the query: ?step_ms=N
    python vllm_frontend.py TOKENIZER_DIR TOKEN_IDS.json                  print the parts' times as JSON

What is vLLM's: the request's and the chunks' pydantic types, the output processor with its detokenizer and its
queue per request, and the generator of the chat endpoint's events. FastAPI's StreamingResponse and uvicorn are put
around them as vLLM's server does. Left out, in vLLM's favour: the socket and msgpack between its engine and its API
process, its metrics, and what its renderer does around transformers' template and tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

MODEL = "default"


class Sequences:
    """The stub engine: one token per running sequence and step, through vLLM's output processor."""

    def __init__(self, tokenizer: Any, token_ids: list[int]):
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.running: dict[str, list[int]] = {}  # id -> [position, left]
        self._token_ids = token_ids
        self._started = 0

    def start(self, prompt_ids: list[int], prompt: str, params: SamplingParams) -> RequestOutputCollector:
        name = uuid.uuid4().hex
        queue = RequestOutputCollector(params.output_kind, name)
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=name,
        )
        self.processor.add_request(request, prompt, queue=queue)
        self._started += 1
        self.running[name] = [self._started, params.max_tokens]
        return queue

    def step(self) -> None:
        outputs = []
        for name, state in list(self.running.items()):
            token = self._token_ids[state[0] % len(self._token_ids)]
            state[0] += 1
            state[1] -= 1
            last = state[1] <= 0
            outputs.append(EngineCoreOutput(request_id=name, new_token_ids=[token], finish_reason=FinishReason.LENGTH if last else None))
            if last:
                del self.running[name]
        self.processor.process_outputs(outputs)


async def outputs_of(queue: RequestOutputCollector) -> AsyncIterator[Any]:
    """As the generator that vLLM's engine client gives to an endpoint."""
    finished = False
    while not finished:
        output = queue.get_nowait() or await queue.get()
        finished = output.finished
        yield output


def serving() -> OpenAIServingChat:
    """The endpoint without the engine client that its constructor asks for: what its event generator looks at."""
    chat = object.__new__(OpenAIServingChat)
    chat.__dict__.update(
        parser_cls=None,
        response_role="assistant",
        enable_force_include_usage=False,
        enable_prompt_tokens_details=False,
        enable_log_outputs=False,
        enable_log_deltas=False,
        enable_per_request_metrics=False,
        _include_reasoning_tokens_details=False,
        request_logger=None,
        log_error_stack=False,
        system_fingerprint=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
    )
    return chat


def events_of(chat: OpenAIServingChat, request: ChatCompletionRequest, queue: RequestOutputCollector, tokenizer: Any) -> Any:
    metadata = SimpleNamespace(final_usage_info=None, request_id="r")
    return chat.chat_completion_stream_generator(request, outputs_of(queue), f"chatcmpl-{uuid.uuid4().hex}", MODEL, [], tokenizer, metadata)


def rendered(tokenizer: Any, request: ChatCompletionRequest) -> str:
    return tokenizer.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)


def sampling(request: ChatCompletionRequest) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=request.max_tokens, output_kind=RequestOutputKind.DELTA)


def serve(tokenizer: Any, token_ids: list[int], port: int, step_ms: float) -> None:
    app, chat, sequences, pace = FastAPI(), serving(), Sequences(tokenizer, token_ids), {"s": step_ms / 1000}
    work = asyncio.Event()

    async def run_engine() -> None:
        while True:
            await work.wait()
            sequences.step()
            if not sequences.running:
                work.clear()
            await asyncio.sleep(pace["s"])

    @app.get("/health")
    async def health(step_ms: float = step_ms) -> dict[str, str]:
        pace["s"] = step_ms / 1000
        app.state.engine = getattr(app.state, "engine", None) or asyncio.create_task(run_engine())
        return {}

    @app.post("/v1/chat/completions")
    async def create(request: ChatCompletionRequest) -> StreamingResponse:
        prompt = rendered(tokenizer, request)
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        queue = sequences.start(prompt_ids, prompt, sampling(request))
        work.set()
        return StreamingResponse(content=events_of(chat, request, queue, tokenizer), media_type="text/event-stream")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def cpu_us(times: int, work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) / times * 1e6


def parts(tokenizer: Any, token_ids: list[int], streams: int, tokens: int) -> dict[str, float]:
    """Microseconds of CPU time, each part alone."""
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": tokenizer.decode(token_ids[:64])}], "max_tokens": tokens, "stream": True}
    )
    request, times = ChatCompletionRequest.model_validate_json(body), 500
    prompt = rendered(tokenizer, request)
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    found = {
        "parse body": cpu_us(times, lambda: [ChatCompletionRequest.model_validate_json(body) for _ in range(times)]),
        "template": cpu_us(times, lambda: [rendered(tokenizer, request) for _ in range(times)]),
        "tokenize": cpu_us(times, lambda: [tokenizer(prompt, add_special_tokens=False).input_ids for _ in range(times)]),
    }
    sequences, chat = Sequences(tokenizer, token_ids), serving()
    queues = [sequences.start(prompt_ids, prompt, sampling(request)) for _ in range(streams)]
    steps: list[list[Any]] = []

    def detokenize() -> None:
        while sequences.running:
            sequences.step()
            steps.append([queue.get_nowait() for queue in queues])

    found["detokenize"] = cpu_us(streams * tokens, detokenize)

    async def replayed(outputs: list[Any]) -> AsyncIterator[Any]:
        for output in outputs:
            yield output

    async def encode() -> None:
        for i in range(streams):
            metadata = SimpleNamespace(final_usage_info=None, request_id="r")
            source = replayed([step[i] for step in steps])
            events = [event async for event in chat.chat_completion_stream_generator(request, source, "chatcmpl-1", MODEL, [], tokenizer, metadata)]
            assert len(events) == len(steps) + 2, events[-2:]  # the role before them, [DONE] behind

    found["encode SSE"] = cpu_us(streams * tokens, lambda: asyncio.run(encode()))
    return found


def main() -> None:
    directory, ids_file, *rest = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with open(ids_file) as file:
        token_ids = json.load(file)
    if rest:
        serve(tokenizer, token_ids, int(rest[0]), float(rest[1]))
    else:
        print(json.dumps(parts(tokenizer, token_ids, 32, 128)))


if __name__ == "__main__":
    main()
