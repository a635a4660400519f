"""Driver: an EngineCore and a FakeWorker, moved event by event, and what each client has received."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from fastengine.config import EngineConfig
from fastengine.engine.core import EngineCore, ModelLimits
from fastengine.protocol.control import ControlCommand, ControlRequest, ControlResponse
from fastengine.protocol.outputs import EngineError, OutputBatch, TokenOutput
from fastengine.protocol.requests import GenerateRequest, SamplingParams
from fastengine.protocol.steps import StepPlan, StepResult, WorkerCommand
from fastengine.protocol.tokens import pack_token_ids, unpack_columns
from tests.engine.fake_worker import EOS, STEP_US, VOCAB, FakeWorker, WorkerDied

MAX_MODEL_LEN = 256


@dataclass
class Received:
    """What one request's client has seen."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: EngineError | None = None
    num_cached: int | None = None
    num_output_tokens: int | None = None
    weight_version: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    gone: bool = False  # aborted silently: nothing may come any more

    def add_plain(self, token: int) -> None:
        assert self.finish_reason is None, "a token after the end"
        assert not self.gone, "a token after a silent abort"
        assert self.tokens, "the first token must come with its details"
        self.tokens.append(token)

    def add(self, output: TokenOutput) -> None:
        assert self.finish_reason is None, "output after the end"
        assert not self.gone, "output after a silent abort"
        if not self.tokens and output.token_ids:
            assert output.num_prompt_tokens == len(self.request.prompt_token_ids) // 4
            assert output.num_cached_tokens is not None
            self.num_cached = output.num_cached_tokens
            self.prompt_logprobs = output.prompt_logprobs
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        self.finish_reason, self.stop_token_id, self.error = output.finish_reason, output.stop_token_id, output.error
        self.num_output_tokens, self.weight_version = output.num_output_tokens, output.weight_version
        if output.finish_reason is not None and output.num_output_tokens is not None:
            assert output.num_output_tokens == len(self.tokens)


def make_config(**flags: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model": "fake",
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "long_prefill_token_threshold": 0,
        "check_invariants": True,
    }
    return EngineConfig.from_flags(**{**defaults, **flags})


class Driver:
    """Steps are run in order; with ``lag`` steps are left in flight between turns."""

    def __init__(
        self,
        num_blocks: int = 32,
        max_model_len: int = MAX_MODEL_LEN,
        num_host_blocks: int = 0,
        max_swaps: int | None = None,
        num_disk_blocks: int = 0,
        run_steps: int = 1,
        **flags: Any,
    ):
        """``run_steps``: how many steps of plain decodes one plan may hold."""
        self.config = make_config(**flags)
        self.time = 100.0
        self.limits = ModelLimits(max_model_len=max_model_len, vocab_size=VOCAB, eos_token_ids=(EOS,))
        self.num_host_blocks = num_host_blocks
        self.num_disk_blocks = num_disk_blocks
        self.disk: dict[bytes, np.ndarray] = {}
        # For the workers' threads, not answered; beside each the plan it comes after.
        self.transfers: deque[tuple[int, WorkerCommand]] = deque()
        self.core = EngineCore(
            self.config,
            self.limits,
            num_blocks,
            num_host_blocks,
            num_disk_blocks,
            max_swaps,
            decode_run_ms=run_steps * STEP_US / 1000 if run_steps > 1 else 0.0,
            clock=lambda: self.time,
            wall_clock=lambda: self.time,
        )
        self.num_blocks = num_blocks
        self.worker = self.new_worker()
        self.published: deque[StepPlan] = deque()
        self.results: Iterator[StepResult] | None = None  # of the oldest published plan, once it is begun
        self.received: dict[tuple[int, int], Received] = {}
        self.responses: dict[str, ControlResponse] = {}
        self.next_handle = 0
        self.next_control = 0

    def new_worker(self, weights: int = 1) -> FakeWorker:
        scheduler = self.config.scheduler
        return FakeWorker(
            self.num_blocks,
            self.config.cache.block_size,
            scheduler.max_num_seqs,
            scheduler.token_budget,
            self.num_host_blocks,
            self.core.kv_swaps_per_step,
            self.num_disk_blocks,
            disk=self.disk,
            weights=weights,
        )

    # -- clients --------------------------------------------------------------------------------

    def add(self, prompt: list[int], client: int = 0, request_id: str | None = None, parent_id: str | None = None, **fields: Any) -> Received:
        """Send a request; keyword arguments that GenerateRequest hasn't are its sampling parameters."""
        handle = self.next_handle
        self.next_handle += 1
        own = {name: fields.pop(name) for name in ("priority", "timeout_s", "cache_salt", "adapter", "arrival_time_s", "index") if name in fields}
        request = GenerateRequest(
            request_id=request_id or f"r{handle}",
            client_index=client,
            handle=handle,
            prompt_token_ids=pack_token_ids(prompt),
            sampling=SamplingParams(**{"temperature": 0.0, **fields}),
            parent_id=parent_id,
            **own,
        )
        received = self.received[client, handle] = Received(request)
        self.core.add_request(request)
        return received

    def add_and_run(self, prompt: list[int], **fields: Any) -> Received:
        received = self.add(prompt, **fields)
        self.run()
        return received

    def abort(self, received: Received) -> None:
        self.deliver()
        received.gone = received.finish_reason is None
        self.core.abort_handles(received.request.client_index, [received.request.handle])

    def deliver(self) -> None:
        for client, batch in self.core.take_outputs().items():
            self.deliver_batch(client, batch)
        for _client, response in self.core.take_responses():
            assert response.request_id not in self.responses, "answered twice"
            self.responses[response.request_id] = response

    def deliver_batch(self, client: int, batch: OutputBatch) -> None:
        columns = list(unpack_columns(batch.handles, batch.token_ids, batch.num_steps))
        everyone = [handle for handle, _ in columns] + [output.handle for output in batch.details]
        assert len(set(everyone)) == len(everyone), "a handle twice in one message"
        for handle, tokens in columns:
            for token in tokens:
                self.received[client, handle].add_plain(token)
        for output in batch.details:
            self.received[client, output.handle].add(output)

    # -- control --------------------------------------------------------------------------------

    def control(self, command: ControlCommand) -> str:
        """Send a command; returns its id. The answer appears in ``responses``."""
        request_id = f"c{self.next_control}"
        self.next_control += 1
        self.core.control(ControlRequest(request_id=request_id, client_index=0, command=command))
        self.deliver()
        return request_id

    def call(self, command: ControlCommand) -> ControlResponse:
        """Send a command and turn the engine until it is answered."""
        request_id = self.control(command)
        for _ in range(1000):
            if request_id in self.responses:
                return self.responses[request_id]
            self.turn()
        raise AssertionError(f"{command} was never answered")

    # -- worker ---------------------------------------------------------------------------------

    def publish(self) -> bool:
        """Carry out what the engine wants sent, commands first; whether there was anything."""
        cut = self.core.take_cut()
        if cut is not None:
            self.worker.last_cut_step_id = cut
        commands = self.core.take_commands()
        for command in commands:
            if command.name in ("store_blocks", "load_blocks"):
                assert len(command.args["keys"]) == len(command.args["blocks"]) == len(set(command.args["blocks"]))
                self.transfers.append((self.published[-1].step_id if self.published else -1, command))
                continue
            if command.name == "sleep":
                self.finish_transfers()
            if command.name not in ("profile", "log_level", "checksum", "compile_grammar"):
                assert not self.published, f"{command.name} with a step in flight"
            for rank in range(self.config.parallel.tensor_parallel_size):
                self.core.process_reply(self.worker.reply(command, rank))
        plans = 0
        while (plan := self.core.schedule()) is not None:
            self.published.append(plan)
            plans += 1
        return bool(commands or plans)

    def finish_transfers(self, most: int = 1000) -> bool:
        """The workers' threads do their oldest transfers, at the last moment; False when there is none to be done.

        Workers take plans and commands in order: a transfer begins when the plans before it have run.
        """
        count = 0
        while self.transfers and count < most:
            after, command = self.transfers[0]
            if self.published and self.published[0].step_id <= after:
                break
            self.transfers.popleft()
            count += 1
            result = self.worker.reply(command)
            for rank in range(self.config.parallel.tensor_parallel_size):
                self.core.process_reply(msgspec.structs.replace(result, rank=rank))
        return count > 0

    def answer(self) -> bool:
        """Hand over the next result of the oldest published plan; False when there is none. A dying worker is restarted."""
        if not self.published:
            return False
        plan = self.published[0]
        if self.results is None:
            self.results = self.worker.run(plan)
        try:
            result = next(self.results)
        except WorkerDied:
            self.crash()
            return True
        self.core.process_result(result)
        if result.step_id + result.num_steps + result.num_cut == plan.step_id + plan.num_steps:
            assert next(self.results, None) is None, "a result too many"
            self.results = None
            self.published.popleft()
        return True

    def crash(self) -> None:
        """The worker dies with whatever it has not answered, and another takes its place."""
        poison, failing, run_pieces = self.worker.poison, self.worker.failing, self.worker.run_pieces
        self.published.clear()
        self.results = None
        self.transfers.clear()
        self.core.workers_lost("killed")
        self.deliver()
        self.worker = self.new_worker()
        self.worker.poison, self.worker.failing, self.worker.run_pieces = poison, failing, run_pieces
        self.core.workers_restarted(self.num_blocks)

    def turn(self) -> bool:
        """One turn of the loop; whether anything moved."""
        self.time += 0.001
        self.core.expire()
        moved = self.publish()
        moved = self.answer() or moved
        moved = self.finish_transfers(1) or moved
        self.deliver()
        return moved

    def run(self, max_turns: int = 5000) -> None:
        """Turn until nothing moves."""
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError("the engine does not come to rest")

    def assert_idle(self) -> None:
        """Nothing is left of any request."""
        assert not self.core.has_work()
        gauges = self.core.server_info()["gauges"]
        assert gauges["available_gpu_block_num"] == self.num_blocks
        assert gauges["num_requests_running"] == gauges["num_requests_waiting"] == gauges["num_queued_tokens"] == 0
        assert gauges["available_batch_size"] == gauges["max_batch_size"]
