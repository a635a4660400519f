"""LLM: offline generation in a Python program, through the same engine and workers as the server."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from tqdm import tqdm

from fastengine.config import EngineConfig
from fastengine.entrypoints.instance import STOP_MARGIN_S, EngineProcess, check_config, create_runtime, with_device_defaults
from fastengine.ipc.channels import CONTROL, ENCODER, INTAKE, client_name, pull_socket, push_socket
from fastengine.model_files.load import load_spec
from fastengine.protocol.control import ControlCommand, ControlRequest, ControlResponse, ToClient
from fastengine.protocol.outputs import EngineError, EngineStatus, OutputBatch, TokenOutput, TopLogprobs
from fastengine.protocol.requests import AbortRequest, ClientHello, GenerateRequest, SamplingParams
from fastengine.protocol.tokens import pack_token_ids, unpack_columns
from fastengine.sampling_rules import check_sampling, derived_seed
from fastengine.text.chat_template import load_chat_template
from fastengine.text.load import load_tokenizer
from fastengine.text.output_text import OutputText

CLIENT_INDEX = 0


class EngineDied(RuntimeError):
    """The engine process ended; the message holds its own explanation."""


class GenerationError(RuntimeError):
    """The engine refused or could not finish a request; ``error`` has its HTTP-like code."""

    def __init__(self, error: EngineError):
        super().__init__(error.message)
        self.error = error


@dataclass
class CompletionOutput:
    """One generated sequence. ``token_ids`` includes the stop token that ended it; ``text`` doesn't."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TopLogprobs] | None = None


@dataclass
class RequestOutput:
    """A prompt with its ``n`` completions, in the order of ``index``."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0


class _Sequence:
    """A sequence under way: its record for the caller and its text state."""

    def __init__(self, output: CompletionOutput, text: OutputText, request: RequestOutput):
        self.output = output
        self.text = text
        self.request = request

    def add(self, token_ids: Sequence[int], stop_token_id: int | None) -> bool:
        """Take new tokens; True if a stop string ended the sequence."""
        delta = self.text.add(token_ids, stop_token_id)
        self.output.token_ids.extend(token_ids[: delta.num_tokens])
        self.output.text += delta.text
        return delta.stop_hit is not None


class _Connection:
    """The sockets and the engine process of one LLM. Owned by its finalizer, so that they outlive the LLM."""

    def __init__(self, config: EngineConfig):
        self.runtime = create_runtime(config)
        self.context = zmq.Context()
        self.inbox = pull_socket(self.context, self.runtime.ipc_address(client_name(CLIENT_INDEX)))
        self.intake = push_socket(self.context, self.runtime.ipc_address(INTAKE))
        self.control = push_socket(self.context, self.runtime.ipc_address(CONTROL))
        self.engine = EngineProcess(self.runtime)

    def close(self) -> None:
        self.engine.terminate()
        self.engine.wait(STOP_MARGIN_S)
        self.engine.close()
        # Closed one by one: a context that is collected in the same pass no longer knows its sockets and would wait for them.
        for socket in (self.inbox, self.intake, self.control):
            socket.close(linger=0)
        self.context.term()
        self.runtime.remove()


class LLM:
    """An engine with its workers, for this program alone.

    ``LLM(model, **flags)`` takes the server's flags by name (``max_model_len=512``). It starts the engine
    at once and waits until it is ready; ``close()``, leaving a ``with`` block, garbage collection or the
    end of the program stop it. Make it in the main thread: the engine ends with the thread that made it.
    Calls from several threads take turns.
    """

    def __init__(self, model: str, **flags: Any):
        config = EngineConfig.from_flags(model=model, **flags)
        check_config(config)
        self.config = with_device_defaults(config)
        self.tokenizer = load_tokenizer(self.config.model, load_spec(model))
        self._template = load_chat_template(self.config.model, self.tokenizer)
        self._handles = itertools.count(1)
        self._command_ids = itertools.count(1)
        self._turn = threading.Lock()
        self._decode = msgspec.msgpack.Decoder(ToClient).decode
        self._connection = _Connection(self.config)
        self._poller = zmq.Poller()
        self._poller.register(self._connection.inbox, zmq.POLLIN)
        self._poller.register(self._connection.engine.status_fd, zmq.POLLIN)
        self._finalizer = weakref.finalize(self, self._connection.close)
        self._send(self._connection.intake, ClientHello(CLIENT_INDEX, os.getpid()))
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    # -- public ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids) ``n`` times.

        ``sampling_params``: one for all or one per prompt. Raises GenerationError for the first request
        the engine refuses (the others are aborted), EngineDied when the engine ends.
        """
        requests = []
        for prompt in _separate_prompts(prompts):
            if isinstance(prompt, str):
                requests.append(RequestOutput(prompt, self.tokenizer.encode(prompt, add_special_tokens=True), []))
            else:
                requests.append(RequestOutput(None, list(prompt), []))
        return self._run(requests, _per_prompt(sampling_params, len(requests)), n, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_values: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        if isinstance(messages, str) or not all(isinstance(m, dict | list | tuple) for m in messages):
            raise TypeError('chat() takes a list of messages such as [{"role": "user", "content": "Hi"}], or a list of such lists')
        if self._template is None:
            raise ValueError(f"{self.config.model.model} has no chat template: give one with chat_template=FILE, or call generate()")
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        requests = []
        for conversation in conversations:
            text = self._template.render(list(conversation), add_generation_prompt=add_generation_prompt, **template_values)
            requests.append(RequestOutput(text, self.tokenizer.encode_chat(text), []))
        return self._run(requests, _per_prompt(sampling_params, len(requests)), n, use_tqdm)

    def control(self, command: ControlCommand, timeout_s: float = 60.0) -> dict[str, Any]:
        """Send one control command (``fastengine.protocol.control``) and return its result.

        Raises GenerationError when it fails, TimeoutError when there is no answer in time.
        """
        request_id = f"control-{next(self._command_ids)}"
        with self._turn:
            self._send(self._connection.control, ControlRequest(request_id=request_id, client_index=CLIENT_INDEX, command=command))
            for message in self._messages(timeout_s, f"an answer to {type(command).__name__}"):
                if isinstance(message, ControlResponse) and message.request_id == request_id:
                    if message.error is not None:
                        raise GenerationError(message.error)
                    return message.result
        raise AssertionError("unreachable: _messages ends by raising")

    @staticmethod
    def _send(socket: zmq.Socket, message: msgspec.Struct) -> None:
        socket.send(ENCODER.encode(message))

    def close(self) -> None:
        """Stop the engine and its workers; idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the client side of the engine ------------------------------------------------------------

    def _run(self, requests: list[RequestOutput], params: list[SamplingParams], n: int, use_tqdm: bool) -> list[RequestOutput]:
        for sampling in params:
            check_sampling(sampling, self.tokenizer.vocab_size)
        for request in requests:
            _check_token_ids(request.prompt_token_ids, self.tokenizer.vocab_size)
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if not self._finalizer.alive:
            raise EngineDied("this LLM is closed")
        with self._turn:
            live: dict[int, _Sequence] = {}
            try:
                self._collect(self._sequences(requests, params, n), len(requests) * n, live, use_tqdm)
            finally:
                if live:  # leaving early: nothing of this call may go on
                    self._send(self._connection.intake, AbortRequest(CLIENT_INDEX, list(live)))
        return requests

    def _collect(self, sequences: Iterator[tuple[GenerateRequest, _Sequence]], count: int, live: dict[int, _Sequence], use_tqdm: bool) -> None:
        """Send the sequences, as many at a time as the engine lets wait, and take outputs until none is left."""
        num_tokens, started = 0, time.monotonic()
        limits = self.config.scheduler
        upcoming = next(sequences, None)
        with tqdm(total=count, desc="Generating", unit="seq", disable=not use_tqdm) as bar:
            messages = self._messages(None, "outputs")
            queued = 0  # prompt tokens of the live ones, which all may be waiting
            while upcoming is not None or live:
                while upcoming is not None:
                    message, sequence = upcoming
                    size = len(sequence.request.prompt_token_ids)
                    if live and (len(live) >= limits.max_waiting_requests or queued + size > limits.max_queued_tokens):
                        break
                    live[message.handle] = sequence
                    queued += size
                    self._send(self._connection.intake, message)
                    upcoming = next(sequences, None)
                batch = next(messages)
                if not isinstance(batch, OutputBatch):
                    continue
                done, gained = self._take(batch, live)
                num_tokens += gained
                if done:
                    queued -= sum(len(sequence.request.prompt_token_ids) for sequence in done)
                    bar.set_postfix_str(f"{num_tokens / (time.monotonic() - started):.0f} tokens/s", refresh=False)
                    bar.update(len(done))

    def _sequences(self, requests: list[RequestOutput], params: list[SamplingParams], n: int) -> Iterator[tuple[GenerateRequest, _Sequence]]:
        """Every request's ``n`` sequences, made when they are asked for."""
        for request, sampling in zip(requests, params, strict=True):
            parent = f"offline-{next(self._handles)}"
            packed = pack_token_ids(request.prompt_token_ids)
            for index in range(n):
                child = sampling
                if n > 1 and sampling.seed is not None:
                    child = msgspec.structs.replace(sampling, seed=derived_seed(sampling.seed, index))
                output = CompletionOutput(index)
                request.outputs.append(output)
                message = GenerateRequest(
                    request_id=f"{parent}#{index}",
                    parent_id=parent,
                    index=index,
                    client_index=CLIENT_INDEX,
                    handle=next(self._handles),
                    prompt_token_ids=packed,
                    sampling=child,
                    arrival_time_s=time.time(),
                )
                yield message, _Sequence(output, OutputText(self.tokenizer, request.prompt_token_ids, sampling), request)

    def _take(self, batch: OutputBatch, live: dict[int, _Sequence]) -> tuple[list[_Sequence], int]:
        """Apply a message's outputs; returns (sequences that ended, tokens gained)."""
        done: list[_Sequence] = []
        gained = 0
        plain = (
            TokenOutput(handle=handle, token_ids=token_ids) for handle, token_ids in unpack_columns(batch.handles, batch.token_ids, batch.num_steps)
        )
        for out in itertools.chain(batch.details, plain):
            sequence = live.get(out.handle)
            if sequence is None:  # ended by a stop string: the engine had computed further
                continue
            if out.error is not None:
                raise GenerationError(out.error)
            gained += len(out.token_ids)
            if out.num_cached_tokens is not None:
                sequence.request.num_cached_tokens = max(sequence.request.num_cached_tokens, out.num_cached_tokens)
            if out.logprobs is not None:
                sequence.output.logprobs = [*(sequence.output.logprobs or []), *out.logprobs]
            if sequence.add(out.token_ids, out.stop_token_id):
                self._send(self._connection.intake, AbortRequest(CLIENT_INDEX, [out.handle], "stop"))
                sequence.output.finish_reason = "stop"
            elif out.finish_reason is not None:
                sequence.output.text += sequence.text.finish()
                sequence.output.finish_reason = out.finish_reason
            if sequence.output.finish_reason is not None:
                done.append(live.pop(out.handle))
        return done, gained

    def _messages(self, timeout_s: float | None, awaited: str) -> Iterator[OutputBatch | EngineStatus | ControlResponse]:
        """What the engine sends, as it comes. Raises EngineDied, or TimeoutError naming ``awaited``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = None if deadline is None else int(max(0.0, deadline - time.monotonic()) * 1000) + 1
            ready = dict(self._poller.poll(left_ms))
            if not ready:
                raise TimeoutError(f"no {awaited} within {timeout_s} s")
            engine = self._connection.engine
            if engine.status_fd in ready and not engine.read_statuses():
                raise EngineDied(engine.last_status.message or f"the engine process ended with code {engine.wait(1.0)}")
            if self._connection.inbox in ready:
                yield self._decode(self._connection.inbox.recv())

    def _wait_ready(self) -> None:
        with tqdm(total=100, desc="Loading weights", unit="%", disable=None, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}") as bar:
            for message in self._messages(self.config.parallel.worker_start_timeout + STOP_MARGIN_S, "ready engine"):
                if isinstance(message, EngineStatus):
                    bar.update(round(message.progress * 100) - bar.n)
                    if message.state == "ready":
                        return


def _separate_prompts(prompts: Any) -> Sequence[str | Sequence[int]]:
    """The prompts one by one. Raises TypeError for anything but text, token ids, or a list of either."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        if prompts and all(isinstance(token, int) for token in prompts):
            return [prompts]
        if all(isinstance(p, str) or (isinstance(p, Sequence) and not isinstance(p, bytes) and all(isinstance(t, int) for t in p)) for p in prompts):
            return prompts
    raise TypeError("prompts must be a text, a list of token ids, or a list of texts or of token id lists")


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"prompts: token id {wrong} is outside of the vocabulary ({vocab_size} tokens)")


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError("sampling_params must be a SamplingParams, or a list with one for each prompt")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts")
    return list(params)
