"""POST /v1/completions"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from fastengine.entrypoints.openai.chunks import ChunkWriter, PlainChunks
from fastengine.entrypoints.openai.endpoint import GeneratingEndpoint, raise_error
from fastengine.entrypoints.openai.generation import (
    Job,
    Prompt,
    check_length,
    check_num_sequences,
    check_prompt_ids,
    item_names,
    now_s,
    num_generated,
)
from fastengine.entrypoints.openai.logprobs import completion_logprobs, prompt_logprobs
from fastengine.entrypoints.openai.refused_fields import REFUSED_BY_COMPLETIONS
from fastengine.entrypoints.openai.request_types import CompletionRequest
from fastengine.entrypoints.openai.response_types import Completion, CompletionChoice, CompletionLogprobs
from fastengine.entrypoints.openai.sampling import sampling_params
from fastengine.entrypoints.openai.structured import structured_output
from fastengine.entrypoints.responses import DONE_EVENT, EventWriter
from fastengine.frontend.errors import bad_request
from fastengine.frontend.text_service import ModelText, PromptKind
from fastengine.frontend.text_stream import SequenceText, TextStream, TextUpdate
from fastengine.protocol.outputs import FinishReason, TopLogprobs

# OpenAI's default for completions (chat has none).
DEFAULT_MAX_TOKENS = 16


class CompletionEndpoint(GeneratingEndpoint[CompletionRequest, Job]):
    body_type = CompletionRequest
    refused = REFUSED_BY_COMPLETIONS
    id_prefix = "cmpl"

    async def prepare(self, body: CompletionRequest, request_id: str, model: str, text: ModelText) -> Job:
        max_tokens = body.max_tokens
        if max_tokens == 0 and not body.echo:
            raise bad_request("max_tokens", "expected int >= 1 (0 is for echo alone)")
        # The engine always samples: with 0 its token is left out of the reply.
        sampling = sampling_params(body, text, max_tokens=max(1, DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens), logprobs=body.logprobs)
        if body.echo and body.logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
        asked = structured_output(body)
        if asked is not None:
            await self._front.text.check_grammar(asked.param, asked.grammar)
            sampling = msgspec.structs.replace(sampling, grammar=asked.grammar)
        n = num_generated(body)
        names, prompts = await self._prompts(body, text, n)
        for name, prompt in zip(names, prompts, strict=True):
            check_length(name, len(prompt.token_ids), max_tokens, text.max_model_len)
        if max_tokens is None:
            # A default is no reason to refuse a prompt.
            room = text.max_model_len - max(len(prompt.token_ids) for prompt in prompts)
            sampling = msgspec.structs.replace(sampling, max_tokens=min(DEFAULT_MAX_TOKENS, room))
        return Job(
            request_id=request_id,
            created=now_s(),
            model=model,
            fields=body,
            prompts=prompts,
            sampling=sampling,
            n=n,
            track_offsets=body.logprobs is not None,
            grammar_param=None if asked is None else asked.param,
        )

    async def _prompts(self, body: CompletionRequest, text: ModelText, n: int) -> tuple[list[str], list[Prompt]]:
        """(the name of each prompt, the prompts)"""
        given: Any
        param, given = ("prompt", body.prompt) if body.prompt_token_ids is None else ("prompt_token_ids", body.prompt_token_ids)
        if given is None:
            raise bad_request("prompt", "this field is required")
        if not given:
            raise bad_request(param, "the prompt is empty")
        is_one = isinstance(given, str) or all(isinstance(item, int) for item in given)
        names, given = ([param], [given]) if is_one else (item_names(param, given), given)
        check_num_sequences(param, len(given), n)
        if all(isinstance(item, str) for item in given):
            if "" in given:
                raise bad_request(names[given.index("")], "the prompt is empty")
            kind: PromptKind = "plain" if body.add_special_tokens is False else "special"
            encoded = await asyncio.gather(*(self._front.text.encode(item, kind, param=name) for name, item in zip(names, given, strict=True)))
            prompts = [Prompt(row.token_ids, row.text) for row in encoded]
        elif all(isinstance(item, list) for item in given):
            prompts = [Prompt(item) for item in given]
        else:
            raise bad_request(param, "must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
        for name, prompt in zip(names, prompts, strict=True):
            check_prompt_ids(name, prompt.token_ids, text.spec.vocab_size)
        return names, prompts

    async def answer(self, job: Job, text: ModelText, stream: TextStream) -> Completion:
        answers = [_Answer(job, sequence, text) for sequence in stream.sequences]
        while not stream.finished:
            updates = await stream.updates()
            raise_error(updates, job.grammar_param)
            for update in updates:
                answers[update.index].add(update)
        return Completion(
            id=job.request_id,
            created=job.created,
            model=job.model,
            choices=[answers[sequence].choice(i) for i, sequence in enumerate(job.chosen(stream.sequences))],
            usage=job.usage(stream.sequences),
        )

    async def stream(self, job: Job, text: ModelText, stream: TextStream, writer: EventWriter) -> None:
        body = _fields(job)
        options = body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        chunks = ChunkWriter(
            {"id": job.request_id, "object": "text_completion", "created": job.created, "model": job.model},
            before_text=b'"text":',
            after_text=b"",
            usage_field=include_usage,
        )
        answers = [_Answer(job, sequence, text) for sequence in stream.sequences]
        begun: set[int] = set()
        if writer.direct is not None and not continuous and all(answer.is_plain for answer in answers):
            stream.take_plainly(PlainChunks(chunks, begun, writer.direct, stream.sequences).take)
        while not stream.finished:
            updates = await stream.updates()
            raise_error(updates, job.grammar_param)
            events = []
            for update in updates:
                answer = answers[update.index]
                if not continuous and answer.has_only_text(update):
                    if update.text:
                        events.append(chunks.plain(update.index, update.text))
                    continue
                piece = answer.piece(update)
                events.append(
                    chunks.full(
                        update.index,
                        piece.text,
                        logprobs=piece.logprobs,
                        finish_reason=piece.finish_reason,
                        stop_reason=piece.stop_reason,
                        in_choice=piece.extra,
                        usage=job.usage(stream.sequences) if continuous else None,
                    )
                )
            if stream.finished:
                if include_usage:
                    events.append(chunks.usage(job.usage(stream.sequences)))
                events.append(DONE_EVENT)
            if events:
                await writer.write(b"".join(events), last=stream.finished)
                begun.update(update.index for update in updates)


@dataclass(frozen=True)
class _Piece:
    """What an update adds to one choice; ``extra`` are further fields of the choice."""

    text: str
    token_ids: list[int]
    logprobs: CompletionLogprobs | None
    extra: dict[str, Any]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class _Answer:
    """One choice: turns updates into pieces, the first with what ``echo`` repeats, and can gather them."""

    def __init__(self, job: Job, sequence: SequenceText, text: ModelText):
        self._body = _fields(job)
        self._prompt = job.prompt_of(sequence.index)
        self._sequence = sequence
        self._tokenizer = text.tokenizer
        # Whether what the first piece alone carries has been told.
        self._begun = not (self._body.echo or self._body.return_token_ids) and self._body.prompt_logprobs is None
        self._without_output = self._body.max_tokens == 0
        # Whether pieces hold nothing but text, the first aside.
        self.is_plain = not (self._without_output or self._body.return_token_ids) and self._body.logprobs is None
        self._num_told = 0  # output tokens
        self._echo_length = 0  # characters of the prompt before the output
        self._pieces: list[_Piece] = []

    def has_only_text(self, update: TextUpdate) -> bool:
        """Whether ``update``, as most are, is nothing but more text: then there is no need to make a piece of it."""
        return self.is_plain and self._begun and update.finish_reason is None

    def piece(self, update: TextUpdate) -> _Piece:
        body, prompt = self._body, self._prompt
        text, token_ids, logprobs = update.text, update.token_ids, update.logprobs
        finish_reason, stop_reason = update.finish_reason, update.stop_reason
        if self._without_output:
            text, token_ids, logprobs, stop_reason = "", [], [], None
            # Whatever the token that nobody sees was.
            finish_reason = "length" if finish_reason == "stop" else finish_reason
        extra: dict[str, Any] = {"completion_token_ids": token_ids} if body.return_token_ids else {}
        if not self._begun and body.echo:
            self._echo_length = len(self._prompt_text())
        built = self._logprobs(token_ids, logprobs)
        if not self._begun:
            self._begun = True
            if body.return_token_ids:
                extra["prompt_token_ids"] = prompt.token_ids
            if body.prompt_logprobs is not None and update.prompt_logprobs is not None:
                extra["prompt_logprobs"] = prompt_logprobs(prompt.token_ids, update.prompt_logprobs, self._tokenizer)
            if body.echo:
                text = self._prompt_text() + text
                if body.logprobs is not None and update.prompt_logprobs is not None:
                    echo = completion_logprobs(prompt.token_ids, update.prompt_logprobs, self._tokenizer, num_top=body.logprobs)
                    built = echo if built is None else _joined([echo, built])
        return _Piece(text, token_ids, built, extra, finish_reason, stop_reason)

    def _logprobs(self, token_ids: list[int], logprobs: list[TopLogprobs]) -> CompletionLogprobs | None:
        if self._body.logprobs is None or not logprobs:
            return None
        first = self._num_told
        self._num_told += len(token_ids)
        offsets = [self._echo_length + offset for offset in self._sequence.token_offsets[first : self._num_told]]
        return completion_logprobs(token_ids, logprobs, self._tokenizer, num_top=self._body.logprobs, offsets=offsets)

    def _prompt_text(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        return self._tokenizer.decode(list(self._prompt.token_ids), skip_special_tokens=self._body.skip_special_tokens is not False)

    def add(self, update: TextUpdate) -> None:
        self._pieces.append(self.piece(update))

    def choice(self, index: int) -> CompletionChoice:
        pieces, last = self._pieces, self._pieces[-1]
        choice = CompletionChoice(
            index=index,
            text="".join(piece.text for piece in pieces),
            logprobs=_joined([piece.logprobs for piece in pieces if piece.logprobs is not None]) if self._body.logprobs is not None else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )
        for piece in pieces[:1]:
            if "prompt_logprobs" in piece.extra:
                choice.prompt_logprobs = piece.extra["prompt_logprobs"]
        if self._body.return_token_ids:
            choice.prompt_token_ids = list(self._prompt.token_ids)
            choice.completion_token_ids = [token for piece in pieces for token in piece.token_ids]
        return choice


def _joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[top for part in tops for top in part] if tops else None,
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def _fields(job: Job) -> CompletionRequest:
    assert isinstance(job.fields, CompletionRequest)
    return job.fields
