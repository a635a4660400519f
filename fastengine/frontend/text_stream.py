"""TextStream: a generation's tokens as text, with stop strings applied."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fastengine.frontend.request_manager import GenerationStream, PlainTaker, SequenceUpdate
from fastengine.protocol.outputs import FINISH_ABORT, FINISH_STOP, EngineError, FinishReason, TopLogprobs
from fastengine.protocol.requests import SamplingParams
from fastengine.text.output_text import OutputText
from fastengine.text.tokenizer import Tokenizer


class TextUpdate(msgspec.Struct, kw_only=True):
    """What one sequence gained as a client sees it.

    ``token_ids`` and ``logprobs`` belong to the same tokens; ``text`` may lag behind them (half a
    character, the beginning of a stop string) and catches up with ``finish_reason`` at the latest.
    ``stop_reason`` is the stop string or the id of the stop token that ended the sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TopLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TopLogprobs | None] | None = None
    error: EngineError | None = None


class SequenceText:
    """The text side of one sequence: its detokenizer, and the counts that usage is made of."""

    def __init__(self, index: int, output: OutputText, *, min_tokens_per_update: int):
        self.index = index
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self._logprob_sum = 0.0
        self.weight_version: str | None = None
        self._output = output
        self._min_tokens = min_tokens_per_update
        self._held: TextUpdate | None = None

    @property
    def token_offsets(self) -> list[int]:
        """Where each output token's text begins, in characters; empty unless offsets are tracked."""
        return self._output.token_offsets

    @property
    def mean_logprob(self) -> float:
        """The log-probability per output token so far; 0 unless log-probabilities are computed."""
        return self._logprob_sum / max(1, self.num_output_tokens)

    def take(self, update: SequenceUpdate) -> TextUpdate | None:
        """Turn tokens into text. None when nothing is to be told yet (``max_streaming_response_tokens``)."""
        if update.num_cached_tokens is not None:
            self.num_cached_tokens = update.num_cached_tokens
        if update.weight_version is not None:
            self.weight_version = update.weight_version
        told = self._to_text(update)
        self.num_output_tokens += len(told.token_ids)
        if told.logprobs:
            self._logprob_sum += sum(entry.logprob for entry in told.logprobs)
        return told if self._min_tokens <= 1 else self._hold(told)

    @property
    def is_plain(self) -> bool:
        """Whether :meth:`plain` may be called for tokens that neither end the sequence nor come with anything else."""
        return self._min_tokens <= 1 and self._output.is_plain

    def plain(self, token_ids: list[int]) -> str:
        """:meth:`take` for such tokens: their text."""
        self.num_output_tokens += len(token_ids)
        return self._output.plain(token_ids)

    def cut_off(self) -> TextUpdate:
        """What had been held back, of a sequence that nobody reads on."""
        told = self._to_text(SequenceUpdate(index=self.index, token_ids=[], finish_reason=FINISH_ABORT))
        return told if self._held is None else _joined(self._held, told)

    def _to_text(self, update: SequenceUpdate) -> TextUpdate:
        told = TextUpdate(index=self.index, text="", token_ids=update.token_ids, logprobs=update.logprobs)
        if update.token_ids:
            delta = self._output.add(update.token_ids, update.stop_token_id)
            told.text = delta.text
            if delta.num_tokens < len(update.token_ids):
                told.token_ids = update.token_ids[: delta.num_tokens]
                told.logprobs = update.logprobs[: delta.num_tokens]
            if delta.stop_hit is not None:
                told.finish_reason = FINISH_STOP
                told.stop_reason = delta.stop_hit
        if told.finish_reason is None and update.finish_reason is not None:
            told.text += self._output.finish()
            told.finish_reason = update.finish_reason
            told.stop_reason = update.stop_token_id
            told.error = update.error
        told.prompt_logprobs = update.prompt_logprobs
        return told

    def _hold(self, told: TextUpdate) -> TextUpdate | None:
        if self._held is not None:
            told = _joined(self._held, told)
        full = told.finish_reason is not None or len(told.token_ids) >= self._min_tokens
        self._held = None if full else told
        return told if full else None


def _joined(held: TextUpdate, told: TextUpdate) -> TextUpdate:
    """``told`` with what was held before it."""
    told.text = held.text + told.text
    told.token_ids = held.token_ids + told.token_ids
    told.logprobs = held.logprobs + told.logprobs
    if told.prompt_logprobs is None:
        told.prompt_logprobs = held.prompt_logprobs
    return told


class TextStream:
    """Reads a :class:`GenerationStream` as text; aborts a sequence as soon as a stop string is found.

    ``prompts`` has the token ids of every sequence's prompt; ``sampling`` holds for all.
    """

    def __init__(
        self,
        stream: GenerationStream,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        track_offsets: bool = False,
        min_tokens_per_update: int = 1,
    ):
        self._stream = stream
        self.sequences = [
            SequenceText(
                index,
                OutputText(tokenizer, prompt_ids, sampling, track_offsets=track_offsets),
                min_tokens_per_update=min_tokens_per_update,
            )
            for index, prompt_ids in enumerate(prompts)
        ]

    @property
    def finished(self) -> bool:
        return self._stream.finished

    def interrupt(self, reason: Exception) -> None:
        """Make the reader's next :meth:`updates` raise ``reason``."""
        self._stream.interrupt(reason)

    def take_plainly(self, taker: PlainTaker) -> None:
        """Let ``taker`` have tokens that come with nothing else while the reader waits in :meth:`updates`, which tells of them no more.

        It gets their text from :meth:`SequenceText.plain`; where that can't be, everything comes by :meth:`updates`.
        """
        if all(sequence.is_plain for sequence in self.sequences):
            self._stream.take_plainly(taker)

    async def updates(self) -> list[TextUpdate]:
        """Wait for news of any sequence; may be empty when nothing of it is to be told yet."""
        told = []
        for update in await self._stream.updates():
            sequence = self.sequences[update.index]
            text_update = sequence.take(update)
            if text_update is not None:
                told.append(text_update)
                if text_update.finish_reason is not None and update.finish_reason is None:
                    self._stream.drop(update.index)
        return told
