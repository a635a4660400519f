"""SGLang's POST /generate: text or token ids in, text, ids and log-probabilities out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from fastengine.entrypoints.arrival import arrived
from fastengine.entrypoints.event_json import event_json
from fastengine.entrypoints.openai.endpoint import raise_error
from fastengine.entrypoints.openai.generation import Prompt, check_length, check_num_sequences, check_prompt_ids, generate, item_names
from fastengine.entrypoints.openai.logprobs import finite
from fastengine.entrypoints.openai.refused_fields import Refused, refused_by
from fastengine.entrypoints.openai.request_types import GenerationFields
from fastengine.entrypoints.openai.sampling import sampling_params
from fastengine.entrypoints.openai.structured import structured_output
from fastengine.entrypoints.renamed_fields import by_root, renamed_fields
from fastengine.entrypoints.responses import DONE_EVENT, EventStream, EventWriter, JsonReply, interrupted_by_disconnect
from fastengine.entrypoints.sglang.generate_types import GenerateBody, GenerateReply, LogprobEntry, MetaInfo, SamplingFields
from fastengine.frontend.errors import bad_request
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.request_manager import GenerationStream, SequenceInput
from fastengine.frontend.text_service import ModelText
from fastengine.frontend.text_stream import SequenceText, TextUpdate
from fastengine.protocol.outputs import FINISH_LENGTH, FINISH_STOP, TopLogprobs
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.tokens import pack_token_ids
from fastengine.sampling_rules import derived_seed
from fastengine.text.output_text import OutputText
from fastengine.text.tokenizer import Tokenizer

T = TypeVar("T")
DEFAULT_MAX_NEW_TOKENS = 128
# Field -> the values that ask for nothing, next to null.
REFUSED: Refused = refused_by(
    GenerateBody,
    {
        "audio_data": ([],),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "custom_logit_processor": (),
        "data_parallel_rank": (),
        "image_data": ([],),
        "input_embeds": ([],),
        "lora_path": ("",),
        "modalities": ([],),
        "return_hidden_states": (False,),
        "session_params": ({},),
        "token_ids_logprob": ([],),
        "video_data": ([],),
    },
)
# GenerationFields' names -> those of sampling_params, where they differ.
SAMPLING_NAMES = {
    "guided_grammar": "ebnf",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "include_stop_str_in_output": "no_stop_trim",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}


@dataclass(frozen=True)
class Entry:
    """One prompt of a body and what is wanted of its outputs.

    ``logprob_start`` None: no prompt log-probabilities. Not ``with_output``: the engine's one token is left out of the reply.
    ``grammar_param`` is the field that brought a grammar.
    """

    prompt: Prompt
    sampling: SamplingParams
    n: int
    logprob_start: int | None
    with_text: bool
    with_output: bool
    grammar_param: str | None


class GenerateEndpoint:
    def __init__(self, front: FrontEnd):
        self._front = front

    async def handle(self, request: Request) -> Response:
        front = self._front
        new = await arrived(front, request, GenerateBody, REFUSED, "gen", given_id=lambda body: one_of(body, "rid", "request_id"))
        body, request_id = new.body, new.request_id
        body.cache_salt = one_of(body, "extra_key", "cache_salt")
        text = await front.text.ready()
        entries, is_batch = await self._entries(body, text)
        batch = Batch(request_id, entries, text, front.engine.status.weight_version)
        if body.stream:
            return EventStream(
                lambda receive, writer: self._stream(batch, is_batch, body, receive, writer), request_id=request_id, headers=new.headers
            )
        async with self._start(batch, body) as stream, interrupted_by_disconnect(request.receive, stream):
            while not stream.finished:
                await batch.take(stream)
        replies = [output.reply() for output in batch.outputs]
        return JsonReply(replies if is_batch else replies[0], headers=new.headers)

    async def _stream(self, batch: Batch, is_batch: bool, body: GenerateBody, receive: Receive, writer: EventWriter) -> None:
        async with self._start(batch, body) as stream, interrupted_by_disconnect(receive, stream):
            while not stream.finished:
                events = []
                for output in await batch.take(stream):
                    reply = output.reply()
                    if is_batch:
                        reply.index = output.text.index
                    events.append(b"data: " + event_json(reply) + b"\n\n")
                if stream.finished:
                    events.append(DONE_EVENT)
                if events:
                    await writer.write(b"".join(events), last=stream.finished)

    def _start(self, batch: Batch, body: GenerateBody) -> GenerationStream:
        return generate(self._front.manager, batch.request_id, batch.inputs(), body)

    async def _entries(self, body: GenerateBody, text: ModelText) -> tuple[list[Entry], bool]:
        """(what to generate, whether the reply is a list)"""
        param, prompts, is_list = await self._prompts(body)
        count, names = len(prompts), item_names(param, prompts) if is_list else [param]
        samplings = per_prompt("sampling_params", SamplingFields() if body.sampling_params is None else body.sampling_params, count)
        places = item_names("sampling_params", body.sampling_params) * (1 if isinstance(body.sampling_params, list) else count)
        with_logprobs = per_prompt(
            "return_logprob", bool(body.return_logprob) if not isinstance(body.return_logprob, list) else body.return_logprob, count
        )
        starts = per_prompt("logprob_start_len", -1 if body.logprob_start_len is None else body.logprob_start_len, count)
        tops = per_prompt("top_logprobs_num", 0 if body.top_logprobs_num is None else body.top_logprobs_num, count)
        check_num_sequences(param, 1, sum(fields.n or 1 for fields in samplings))
        entries = []
        for name, prompt, where, fields, wanted, start, top in zip(names, prompts, places, samplings, with_logprobs, starts, tops, strict=True):
            check_prompt_ids(name, prompt.token_ids, text.spec.vocab_size)
            max_tokens = DEFAULT_MAX_NEW_TOKENS if fields.max_new_tokens is None else fields.max_new_tokens
            if fields.max_new_tokens is None:
                # A default is no reason to refuse a prompt.
                max_tokens = max(1, min(max_tokens, text.max_model_len - len(prompt.token_ids)))
            check_length(name, len(prompt.token_ids), max_tokens, text.max_model_len, limit_param=f"{where}.max_new_tokens")
            # The engine always samples.
            grammar_param, sampling = await self._sampling(where, fields, text, max(1, max_tokens), top if wanted else None)
            first = start if wanted and 0 <= start < len(prompt.token_ids) else None
            if first is not None:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=top)
            entries.append(Entry(prompt, sampling, fields.n or 1, first, bool(body.return_text_in_logprobs), max_tokens > 0, grammar_param))
        return entries, is_list or len(entries) * entries[0].n > 1

    async def _prompts(self, body: GenerateBody) -> tuple[str, list[Prompt], bool]:
        """(the field they came from, the prompts, whether it was a list of them)"""
        if body.text is None and body.input_ids is None:
            raise bad_request("text", "send either text or input_ids")
        if body.text is not None and body.input_ids is not None:
            raise bad_request("input_ids", "can't be sent together with text")
        if body.input_ids is not None:
            ids = body.input_ids
            flat = [item for item in ids if isinstance(item, int)]
            rows = [item for item in ids if isinstance(item, list)]
            if not ids or (flat and rows):
                raise bad_request("input_ids", "must be a list of token ids or a list of such lists, and not empty")
            check_num_sequences("input_ids", len(rows))
            return "input_ids", [Prompt(row) for row in rows] if rows else [Prompt(flat)], bool(rows)
        assert body.text is not None
        names, texts = item_names("text", body.text), [body.text] if isinstance(body.text, str) else body.text
        check_num_sequences("text", len(texts))
        if not texts or "" in texts:
            raise bad_request(names[texts.index("")] if texts else "text", "the prompt is empty")
        encoded = await asyncio.gather(*(self._front.text.encode(item, "special", param=names[i]) for i, item in enumerate(texts)))
        return "text", [Prompt(row.token_ids, row.text) for row in encoded], isinstance(body.text, list)

    async def _sampling(
        self, where: str, fields: SamplingFields, text: ModelText, max_tokens: int, logprobs: int | None
    ) -> tuple[str | None, SamplingParams]:
        """(the field that brought a grammar, the sampling). ``where`` the caller has put ``fields``."""
        rename = sampling_names(where)
        same = GenerationFields(
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            min_p=fields.min_p,
            seed=fields.sampling_seed,
            min_tokens=fields.min_new_tokens,
            stop=fields.stop,
            stop_token_ids=fields.stop_token_ids,
            include_stop_str_in_output=fields.no_stop_trim,
            ignore_eos=fields.ignore_eos,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            repetition_penalty=fields.repetition_penalty,
            logit_bias=fields.logit_bias,
            skip_special_tokens=fields.skip_special_tokens,
            guided_json=fields.json_schema,
            guided_regex=fields.regex,
            guided_grammar=fields.ebnf,
            structural_tag=fields.structural_tag,
        )
        with renamed_fields(rename):
            sampling = sampling_params(same, text, max_tokens=max_tokens, logprobs=logprobs)
            wanted = structured_output(same)
            if wanted is None:
                return None, sampling
            await self._front.text.check_grammar(wanted.param, wanted.grammar)
            return rename(wanted.param), msgspec.structs.replace(sampling, grammar=wanted.grammar)


def sampling_names(where: str) -> Callable[[str], str]:
    """A renaming of GenerationFields' fields to what the caller calls them, who has put them into ``where``."""
    rename = by_root(SAMPLING_NAMES)
    # The one whose value is not among them.
    return lambda param: "return_logprob" if param == "logprobs" else f"{where}.{rename(param)}"


def one_of(body: GenerateBody, name: str, other: str) -> str | None:
    """The value of a field that has two names. Raises ApiError 400 when both are sent."""
    value, same = getattr(body, name), getattr(body, other)
    if value is not None and same is not None:
        raise bad_request(other, f"is another name of {name}: send one of them")
    return value if value is not None else same


def per_prompt(param: str, value: T | list[T], count: int) -> list[T]:
    """``value`` for each prompt: a list of ``count``, or one for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise bad_request(param, f"has {len(value)} entries for {count} prompts")
    return value


@dataclass
class Output:
    """One sequence's output so far. ``weight_version`` is the engine's when it began; the last token brings the true one."""

    request_id: str
    weight_version: str
    entry: Entry
    text: SequenceText
    tokenizer: Tokenizer
    started_s: float = field(default_factory=time.monotonic)
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TopLogprobs | None] = field(default_factory=list)
    last: TextUpdate | None = None

    def add(self, update: TextUpdate) -> None:
        if self.entry.with_output:
            self.parts.append(update.text)
            self.token_ids += update.token_ids
            self.logprobs += update.logprobs
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.last = update

    def reply(self) -> GenerateReply:
        self.parts = ["".join(self.parts)]
        meta = MetaInfo(
            id=self.request_id,
            finish_reason=self._finish_reason(),
            prompt_tokens=len(self.entry.prompt.token_ids),
            completion_tokens=len(self.token_ids),
            cached_tokens=self.text.num_cached_tokens,
            weight_version=self.text.weight_version or self.weight_version,
            e2e_latency=time.monotonic() - self.started_s,
        )
        if self.entry.sampling.logprobs is not None:
            self._add_logprobs(meta)
        return GenerateReply(text=self.parts[0], output_ids=self.token_ids, meta_info=meta)

    def _finish_reason(self) -> dict[str, Any] | None:
        reason = None if self.last is None else self.last.finish_reason
        if reason is None or self.last is None:
            return None
        if reason == FINISH_STOP and self.entry.with_output:
            return {"type": "stop", "matched": self.last.stop_reason}
        if reason in (FINISH_STOP, FINISH_LENGTH):
            return {"type": "length", "length": len(self.token_ids)}
        return {"type": "abort", "message": "the request was aborted"}

    def _add_logprobs(self, meta: MetaInfo) -> None:
        meta.output_token_logprobs = self._tokens(self.token_ids, self.logprobs)
        meta.output_top_logprobs = self._tops(self.logprobs)
        meta.input_token_logprobs, meta.input_top_logprobs = [], []
        start = self.entry.logprob_start
        if start is not None and self.prompt_logprobs:
            meta.input_token_logprobs = self._tokens(self.entry.prompt.token_ids[start:], self.prompt_logprobs[start:])
            meta.input_top_logprobs = self._tops(self.prompt_logprobs[start:])

    def _tokens(self, token_ids: Sequence[int], entries: Sequence[TopLogprobs | None]) -> list[LogprobEntry]:
        return [
            (None if entry is None else finite(entry.logprob), token_id, self._token_text(token_id))
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]

    def _tops(self, entries: Sequence[TopLogprobs | None]) -> list[list[LogprobEntry] | None]:
        if not self.entry.sampling.logprobs:
            return []
        return [
            None
            if entry is None
            else [(finite(value), top_id, self._token_text(top_id)) for top_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)]
            for entry in entries
        ]

    def _token_text(self, token_id: int) -> str | None:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace") if self.entry.with_text else None


class Batch:
    """All sequences of one body: ``n`` outputs per entry, those of one prompt side by side."""

    def __init__(self, request_id: str, entries: Sequence[Entry], text: ModelText, weight_version: str):
        self.request_id = request_id
        self.outputs: list[Output] = []
        total = sum(entry.n for entry in entries)
        for entry in entries:
            for _ in range(entry.n):
                index = len(self.outputs)
                output_text = OutputText(text.tokenizer, entry.prompt.token_ids, entry.sampling)
                name = request_id if total == 1 else f"{request_id}#{index}"
                self.outputs.append(Output(name, weight_version, entry, SequenceText(index, output_text, min_tokens_per_update=1), text.tokenizer))

    def inputs(self) -> list[SequenceInput]:
        inputs: list[SequenceInput] = []
        answer = 0
        for i, output in enumerate(self.outputs):
            entry = output.entry
            answer = answer + 1 if i and entry is self.outputs[i - 1].entry else 0
            sampling = entry.sampling
            if sampling.seed is not None:
                sampling = msgspec.structs.replace(sampling, seed=derived_seed(sampling.seed, answer))
            packed = inputs[-1].prompt_token_ids if answer else pack_token_ids(entry.prompt.token_ids)
            inputs.append(SequenceInput(packed, sampling))
        return inputs

    async def take(self, stream: GenerationStream) -> list[Output]:
        """Wait for news; the outputs that grew. Raises ApiError when one sequence failed."""
        grown = []
        for update in await stream.updates():
            output = self.outputs[update.index]
            told = output.text.take(update)
            if told is None:
                continue
            raise_error([told], output.entry.grammar_param)
            output.add(told)
            grown.append(output)
            if told.finish_reason is not None and update.finish_reason is None:
                stream.drop(update.index)
        return grown
