"""ResultProcessor: from a step's sampled tokens to what clients receive.

Rows of a result are the slots that decoded, then the slots whose chunk reached their last known token.
Almost all rows are plain: one more token, nothing else. Those are handled as arrays; a row gets a look of
its own only when its token may end it, when it reaches its last token, or when it has log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fastengine.engine.lifecycle import Lifecycle
from fastengine.engine.outputs import OutputCollector
from fastengine.engine.pipeline import InFlightStep, Pipeline, UnexpectedResult
from fastengine.engine.request_state import RequestState, Tokens
from fastengine.engine.resource_manager import ResourceManager
from fastengine.engine.run_length import RunLength
from fastengine.engine.slots import Index, SlotTable
from fastengine.engine.stop_tokens import StopTokens
from fastengine.observability.metrics import EngineMetrics
from fastengine.protocol.outputs import FINISH_LENGTH, FINISH_STOP, EngineError, FinishReason, TokenOutput, TopLogprobs
from fastengine.protocol.steps import StepResult
from fastengine.protocol.tokens import unpack_token_ids

NO_LOGPROBS: dict[int, list[TopLogprobs]] = {}


class ResultProcessor:
    def __init__(
        self,
        slots: SlotTable,
        resources: ResourceManager,
        pipeline: Pipeline,
        lifecycle: Lifecycle,
        outputs: OutputCollector,
        stop_tokens: StopTokens,
        run_length: RunLength,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ):
        self._slots = slots
        self._resources = resources
        self._pipeline = pipeline
        self._lifecycle = lifecycle
        self._outputs = outputs
        self._stop_tokens = stop_tokens
        self._run_length = run_length
        self._metrics = metrics
        self._clock = clock
        self._token_interval = metrics.histograms["time_per_output_token_seconds"]
        self._step_time = metrics.histograms["step_time_seconds"]
        self._step_tokens = metrics.histograms["step_tokens"]
        self._batch_size = metrics.histograms["step_batch_size"]
        self._last_result_at: float | None = None

    def process(self, result: StepResult) -> list[RequestState]:
        """Apply the result of the oldest steps in flight; returns the requests whose chunk sampled.

        Raises UnexpectedResult when it isn't theirs, or its rows are not those of the plan.
        """
        now = self._clock()
        sampled: list[RequestState] = []
        if result.num_steps == 1:
            step, num_decodes, sampled = self._apply(result, now)
            self._measure(step, result, num_decodes, len(sampled), now)
        elif result.num_steps or not result.num_cut:
            step, num_decodes = self._apply_run(result, now)
            self._measure(step, result, num_decodes, 0, now)
        if result.num_cut:
            self._pipeline.take_cut(result.step_id + result.num_steps, result.num_cut)
            self._slots.retreat(result.num_cut)
        return sampled

    def _apply_run(self, result: StepResult, now: float) -> tuple[InFlightStep, int]:
        """Several steps at once; as each by itself if any row needs a look. Returns the plan, and how many tokens were wanted."""
        tokens = unpack_token_ids(result.token_ids).reshape(result.num_steps, len(result.slots) // 4)
        plan = self._pipeline.oldest
        if plan is None or plan.dead or result.slots != plan.expected_slots or self._stop_tokens.reasons.take(tokens, mode="clip").any():
            num_tokens = 0
            for i, row in enumerate(tokens):
                plan, num_decodes, _ = self._apply(StepResult(step_id=result.step_id + i, slots=result.slots, token_ids=row.tobytes()), now)
                num_tokens += num_decodes
            assert plan is not None
            return plan, num_tokens
        self._pipeline.pop(result.step_id, result.num_steps)
        self._outputs.begin_step(result.step_id + result.num_steps - 1)
        self._slots.append_all(plan.batch, tokens)
        self._outputs.add_columns(plan.batch.columns, tokens)
        return plan, tokens.size

    def _apply(self, result: StepResult, now: float) -> tuple[InFlightStep, int, list[RequestState]]:
        """One step. Returns its plan, how many decoded tokens were wanted, and the requests whose chunk sampled."""
        step = self._pipeline.pop(result.step_id)
        self._outputs.begin_step(result.step_id)
        tokens = unpack_token_ids(result.token_ids)
        if result.slots != step.expected_slots:
            tokens = self._without_failed(step, result, tokens)
        for error in result.errors:
            self._fail(step, error.slot, EngineError(error.code, error.message, reason=error.reason))
        logprobs = {item.slot: item.tokens for item in result.logprobs} if result.logprobs else NO_LOGPROBS
        for item in result.prompt_logprobs:
            self._keep_prompt_logprobs(step, item.slot, item.tokens)
        for embedding in result.embeddings:
            self._keep_embedding(step, embedding.slot, embedding.data)
        num_decodes = step.batch.size
        if num_decodes:
            num_decodes = self._append_decoded(step, tokens[:num_decodes] if step.samplers else tokens, logprobs)
        sampled = self._append_first(step, tokens[step.batch.size :], logprobs, now) if step.samplers else []
        return step, num_decodes, sampled

    # -- decoding rows --------------------------------------------------------------------------

    def _append_decoded(self, step: InFlightStep, tokens: Tokens, logprobs: dict[int, list[TopLogprobs]]) -> int:
        """Append one token to each row that is still wanted; returns how many those are."""
        slots, batch = self._slots, step.batch
        rows: Index | None = None  # None: all
        at = batch.slots
        if step.dead:
            rows = slots.alive_rows(at, list(step.dead)).nonzero()[0]
            at, tokens = at[rows], tokens[rows]
            slots.append_some(batch, rows, tokens)
        else:
            slots.append_all(batch, tokens)
        special = self._stop_tokens.reasons.take(tokens, mode="clip").nonzero()[0].tolist()
        if step.last_slots or logprobs:
            special = self._special_rows(step, at, special, logprobs)
        if not special and rows is None:
            self._outputs.add_columns(batch.columns, tokens)
            return len(tokens)
        num_tokens = len(tokens)
        requests, chosen = slots.requests, tokens[special].tolist()
        plain = np.ones(len(at), dtype=np.bool_)
        owners = [(requests[slot], token) for slot, token in zip(at[special].tolist(), chosen, strict=True)]
        details: list[tuple[RequestState, int]] = []
        for row, (request, token) in zip(special, owners, strict=True):
            assert request is not None
            if request.wants_logprobs or self._finish_reason(request, token) is not None:
                plain[row] = False
                details.append((request, token))
        at, tokens = at[plain], tokens[plain]
        self._outputs.add_columns(slots.columns_of(at), tokens)
        for request, token in details:
            self._emit(request, token, logprobs.get(request.slot))
        return num_tokens

    def _special_rows(self, step: InFlightStep, at: Index, stopping: list[int], logprobs: dict[int, list[TopLogprobs]]) -> list[int]:
        """Rows of ``at`` (ascending slots) that need a look: stop tokens, last tokens, log-probabilities."""
        wanted = [slot for slot in (*step.last_slots, *logprobs) if slot not in step.dead]
        rows = np.searchsorted(at, wanted)
        inside = rows < len(at)
        matching = [row for row, slot, ok in zip(rows.tolist(), wanted, inside.tolist(), strict=True) if ok and at[row] == slot]
        return sorted({*stopping, *matching})

    # -- rows of finished chunks ----------------------------------------------------------------

    def _append_first(self, step: InFlightStep, tokens: Tokens, logprobs: dict[int, list[TopLogprobs]], now: float) -> list[RequestState]:
        sampled = []
        for (slot, request), token in zip(step.samplers, tokens.tolist(), strict=True):
            if slot in step.dead:
                continue
            self._slots.append(slot, token)
            sampled.append(request)
            if request.first_token_at is None:
                self._measure_first(request, now)
                self._emit(request, token, logprobs.get(slot), first=True)
            else:
                self._emit(request, token, logprobs.get(slot))
        return sampled

    def _emit(self, request: RequestState, token: int, logprobs: list[TopLogprobs] | None, *, first: bool = False) -> None:
        """One token of ``request``, already appended, as a detail; and its end, if it is that."""
        reason = self._finish_reason(request, token)
        num_output = None
        if reason is not None:
            num_output = self._lifecycle.end(request, reason)
        output = TokenOutput(
            handle=request.request.handle,
            token_ids=[token],
            finish_reason=reason,
            stop_token_id=token if reason == FINISH_STOP else None,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(request) if first else None,
            num_cached_tokens=request.num_cached if first else None,
            num_prompt_tokens=request.num_prompt if first else None,
            num_output_tokens=num_output,
            weight_version=None if reason is None else self._lifecycle.weight_version,
            embedding=request.embedding if first else None,
        )
        self._outputs.add_detail(request.request.client_index, output)

    def _finish_reason(self, request: RequestState, token: int) -> FinishReason | None:
        known = self._slots.num_known_of(request)
        if self._stop_tokens.ends(request, token, known - request.num_prompt):
            return FINISH_STOP
        return FINISH_LENGTH if known >= request.end else None

    # -- log-probabilities and embeddings of prompts --------------------------------------------

    def _keep_prompt_logprobs(self, step: InFlightStep, slot: int, tokens: list[TopLogprobs]) -> None:
        request = self._slots.requests[slot]
        if slot not in step.dead and request is not None and request.first_token_at is None:
            request.prompt_logprobs += tokens

    def _keep_embedding(self, step: InFlightStep, slot: int, data: bytes) -> None:
        request = self._slots.requests[slot]
        if slot not in step.dead and request is not None and request.first_token_at is None:
            request.embedding = data

    @staticmethod
    def _prompt_logprobs(request: RequestState) -> list[TopLogprobs | None] | None:
        if not request.wants_prompt_logprobs:
            return None
        collected, request.prompt_logprobs = request.prompt_logprobs, []
        return [None, *collected]

    # -- failures -------------------------------------------------------------------------------

    def _without_failed(self, step: InFlightStep, result: StepResult, tokens: Tokens) -> Tokens:
        """Fit the tokens to the step's rows when rows are missing because their sequences failed."""
        expected = unpack_token_ids(step.expected_slots)
        answered = unpack_token_ids(result.slots)
        present = np.isin(expected, answered)
        missing = set(expected[~present].tolist())
        failed = {error.slot for error in result.errors}
        if not np.array_equal(expected[present], answered) or not missing <= failed | step.dead:
            raise UnexpectedResult(f"step {result.step_id} was to sample slots {expected.tolist()}, the result has {answered.tolist()}")
        filled = np.zeros(len(expected), dtype=np.int32)
        filled[present] = tokens
        step.dead |= missing - failed
        return filled

    def _fail(self, step: InFlightStep, slot: int, error: EngineError) -> None:
        request = self._slots.requests[slot]
        if slot not in step.dead and request is not None:
            self._resources.distrust(request)
            self._lifecycle.fail(request, error)
        step.dead.add(slot)

    # -- metrics --------------------------------------------------------------------------------

    def _measure_first(self, request: RequestState, now: float) -> None:
        request.first_token_at = now
        histograms = self._metrics.histograms
        histograms["time_to_first_token_seconds"].observe(now - request.arrived_at)
        if request.started_at is not None:
            histograms["request_prefill_time_seconds"].observe(now - request.started_at)
        self._metrics.counters["prompt_tokens"] += request.num_prompt

    def _measure(self, step: InFlightStep, result: StepResult, num_decodes: int, num_first: int, now: float) -> None:
        num_steps = result.num_steps
        # Every decoding row had its previous token in the previous result: one interval stands for all. In a run it is the mean.
        if num_decodes and self._last_result_at is not None:
            self._token_interval.observe((now - self._last_result_at) / num_steps, num_decodes)
        self._last_result_at = now
        self._step_time.observe((now - step.published_at) / num_steps, num_steps)
        step.published_at = now  # for what is left of a run
        self._step_tokens.observe(step.num_tokens, num_steps)
        self._batch_size.observe(step.batch.size + len(step.chunked), num_steps)
        counters = self._metrics.counters
        counters["generation_tokens"] += num_decodes + num_first
        counters["num_steps"] += num_steps
        if not step.chunked and step.batch.size:
            self._run_length.observe(step.batch.size, num_steps, result.forward_us + result.sample_us)
