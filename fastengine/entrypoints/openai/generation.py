"""What chat completions and completions do alike between a checked body and a reply."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.types import Receive

from fastengine.entrypoints.openai.request_types import CommonFields, GenerationFields
from fastengine.entrypoints.openai.response_types import PromptTokensDetails, Usage
from fastengine.entrypoints.responses import interrupted_by_disconnect
from fastengine.frontend.errors import ApiError, bad_request
from fastengine.frontend.request_manager import GenerationStream, RequestManager, SequenceInput
from fastengine.frontend.text_service import ModelText
from fastengine.frontend.text_stream import SequenceText, TextStream
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.tokens import pack_token_ids
from fastengine.sampling_rules import derived_seed

MAX_SEQUENCES = 4096


@dataclass(frozen=True)
class Prompt:
    """``text`` is None when the client sent token ids."""

    token_ids: Sequence[int]
    text: str | None = None


@dataclass(frozen=True)
class Job:
    """A client request that is ready for the engine: ``n`` sequences per prompt.

    Sequence ``i`` is answer ``i % n`` to prompt ``i // n``, and choice ``i`` of the reply unless ``best_of``
    has more generated than are returned. ``grammar_param`` is the request's field that brought a grammar.
    """

    request_id: str
    created: int
    model: str
    fields: GenerationFields
    prompts: list[Prompt]
    sampling: SamplingParams
    n: int
    track_offsets: bool = False
    grammar_param: str | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.n

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    def chosen(self, sequences: Sequence[SequenceText]) -> list[int]:
        """The sequences that are the reply's choices, in its order: of each prompt's all, or those of the highest log-probability per token."""
        num_returned = self.fields.n or 1
        if num_returned == self.n:
            return list(range(len(sequences)))
        groups = [range(first, first + self.n) for first in range(0, len(sequences), self.n)]
        return [i for group in groups for i in sorted(group, key=lambda i: sequences[i].mean_logprob, reverse=True)[:num_returned]]

    def sequence_inputs(self) -> list[SequenceInput]:
        sampling = self.sampling
        if self.n > (self.fields.n or 1) and sampling.logprobs is None:
            sampling = msgspec.structs.replace(sampling, logprobs=0)  # to choose by
        variants = [sampling] * self.n
        if sampling.seed is not None:
            variants = [msgspec.structs.replace(sampling, seed=derived_seed(sampling.seed, i)) for i in range(self.n)]
        return [SequenceInput(packed, params) for packed in (pack_token_ids(prompt.token_ids) for prompt in self.prompts) for params in variants]

    @contextlib.asynccontextmanager
    async def run(self, manager: RequestManager, text: ModelText, receive: Receive) -> AsyncIterator[TextStream]:
        """Start it in the engine. Leaving the context, or the client's going away, aborts what still runs."""
        stream = generate(manager, self.request_id, self.sequence_inputs(), self.fields)
        gathered = self.fields.max_streaming_response_tokens or 1 if self.fields.stream else 1
        async with stream, interrupted_by_disconnect(receive, stream):
            prompts = [prompt.token_ids for prompt in self.prompts for _ in range(self.n)]
            yield TextStream(stream, text.tokenizer, prompts, self.sampling, track_offsets=self.track_offsets, min_tokens_per_update=gathered)

    def usage(self, sequences: Sequence[SequenceText]) -> Usage:
        prompt = sum(len(p.token_ids) for p in self.prompts)
        # The answers after the first find the prompt in the cache because of the first.
        firsts = range(0, len(sequences), self.n)
        cached = sum(min(s.num_cached_tokens for s in sequences[first : first + self.n]) for first in firsts)
        # max_tokens 0 generates one token that nobody sees.
        completion = 0 if self.fields.max_tokens == 0 else sum(s.num_output_tokens for s in sequences)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            weight_version=next((s.weight_version for s in sequences if s.weight_version is not None), UNSET),
        )


def generate(manager: RequestManager, request_id: str, sequences: Sequence[SequenceInput], fields: CommonFields) -> GenerationStream:
    """:meth:`RequestManager.generate` as ``fields`` ask for it."""
    return manager.generate(request_id, sequences, priority=fields.priority or 0, timeout_s=fields.timeout_s, cache_salt=fields.cache_salt or "")


def common_fields(fields: CommonFields) -> dict[str, Any]:
    """``fields``' own values of :class:`CommonFields`, for a body of another kind."""
    return {name: getattr(fields, name) for name in CommonFields.__struct_fields__}


def new_request_id(prefix: str, given: str | None) -> str:
    return given if given is not None else f"{prefix}-{uuid.uuid4().hex}"


def now_s() -> int:
    return int(time.time())


def check_model(asked: str | None, served: Sequence[str]) -> str:
    """The served name that ``asked`` means. Raises ApiError 404."""
    if asked is None or asked == "default":
        return served[0]
    if asked not in served:
        raise ApiError(404, f"model: {asked!r} is not served here; there is {', '.join(served)}", param="model", code="model_not_found")
    return asked


def item_names(param: str, given: Sequence[Any] | Any) -> list[str]:
    """What the entries of ``given`` are called: its own name if it is no list but an entry itself."""
    return [f"{param}[{i}]" for i in range(len(given))] if isinstance(given, list) else [param]


def check_length(param: str, num_prompt: int, max_tokens: int | None, max_model_len: int, *, limit_param: str = "max_tokens") -> None:
    """Raise ApiError 400 with the numbers when prompt and output can't fit the context. ``max_tokens`` 0: the prompt alone is computed.

    ``param`` is the prompt's field, named where it alone is too long, ``limit_param`` that of ``max_tokens``.
    """
    if max_tokens == 0:
        if num_prompt <= max_model_len:
            return
        message = f"the prompt has {num_prompt} tokens; the model's context has {max_model_len}"
    elif num_prompt >= max_model_len:
        message = (
            f"the prompt has {num_prompt} tokens; the model's context of {max_model_len} tokens holds {max_model_len - 1} and one token of output"
        )
    elif max_tokens is not None and num_prompt + max_tokens > max_model_len:
        param = limit_param
        message = f"{max_tokens} and {num_prompt} tokens of the prompt are {num_prompt + max_tokens}; the model's context has {max_model_len}"
    else:
        return
    raise bad_request(param, message, code="context_length_exceeded")


def check_prompt_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise bad_request(param, "the prompt is empty")
    if max(token_ids) >= vocab_size:
        raise bad_request(param, f"token id {max(token_ids)} is outside of the vocabulary ({vocab_size} tokens)")


def num_generated(fields: GenerationFields) -> int:
    """How many answers to generate for each prompt. Raises ApiError 400 for a ``best_of`` that can't be."""
    n = fields.n or 1
    if fields.best_of is None or fields.best_of == n:
        return n
    if fields.best_of < n:
        raise bad_request("best_of", f"{fields.best_of} is less than n ({n})")
    if fields.stream:
        raise bad_request("best_of", "can't be more than n in a stream: the best is known at the end")
    return fields.best_of


def check_num_sequences(param: str, num_prompts: int, n: int = 1) -> None:
    """Raises ApiError 400. To be asked before prompts are tokenized: too many fill a queue that others wait in."""
    if num_prompts > MAX_SEQUENCES:
        raise bad_request(param, f"has {num_prompts} entries; {MAX_SEQUENCES} are allowed")
    if num_prompts * n > MAX_SEQUENCES:
        raise bad_request(param, f"{num_prompts} prompts with n={n} are more than {MAX_SEQUENCES} sequences")
