"""From a request's fields to the engine's SamplingParams, with the checks that span fields."""

from __future__ import annotations

from fastengine.entrypoints.openai.request_types import GenerationFields
from fastengine.frontend.errors import bad_request
from fastengine.frontend.text_service import ModelText
from fastengine.protocol.requests import SamplingParams
from fastengine.sampling_rules import SEED_MASK, SamplingError, check_sampling

# SamplingParams' names -> the requests' own, where they differ.
FIELDS = {"reasoning": "reasoning_max_tokens"}


def sampling_params(request: GenerationFields, text: ModelText, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The parameters all sequences of ``request`` share; raises ApiError 400 naming the field."""
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        seed=None if request.seed is None else request.seed & SEED_MASK,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=_logit_bias(request.logit_bias or {}),
        bad_words_token_ids=_bad_words(request.bad_words or [], request.bad_words_token_ids or [], text),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        stop=stop,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
    )
    return checked(params, text)


def checked(params: SamplingParams, text: ModelText) -> SamplingParams:
    """``params``, if they can be followed. Raises ApiError 400 naming the request's field."""
    if not text.has_logits:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                raise bad_request(name, "the null model has no log-probabilities")
    try:
        check_sampling(params, text.spec.vocab_size)
    except SamplingError as error:
        raise bad_request(FIELDS.get(error.field, error.field), error.message) from None
    return params


def check_stream_options(request: GenerationFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "only allowed when stream is true")


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise bad_request("logit_bias", f"{key[:32]!r} is not a token id")
    return {int(key): value for key, value in bias.items()}


def _bad_words(words: list[str], token_ids_of_others: list[list[int]], text: ModelText) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokens it has at the start of a text and after a space, and what was given as tokens."""
    sequences: dict[tuple[int, ...], None] = dict.fromkeys(map(tuple, token_ids_of_others))
    for word in words:
        for form in (word, " " + word.lstrip(" ")):
            token_ids = tuple(text.tokenizer.encode(form, add_special_tokens=False))
            if token_ids:
                sequences[token_ids] = None
    return tuple(sequences)
