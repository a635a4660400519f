"""Body and reply of SGLang's ``/generate``."""

from __future__ import annotations

from typing import Annotated, Any, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fastengine.entrypoints.openai.request_types import (
    INT32,
    INT64,
    MAX_STOP_STRINGS,
    CommonFields,
    Penalty,
    Probability,
    StopString,
    TokenId,
    TopCount,
)

Temperature = Annotated[float, Meta(ge=0)]
TopK = Annotated[int, Meta(ge=-1, le=INT32)]
LogprobStart = Annotated[int, Meta(ge=-1, le=INT32)]


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's names; null means the default."""

    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT32)] | None, Meta(description="Most tokens to generate; 0: only the prompt is computed. Default 128.")
    ] = None
    min_new_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT32)] | None, Meta(description="No end of sequence, stop token or stop string before this many tokens.")
    ] = None
    temperature: Annotated[Temperature | None, Meta(description="0 means greedy. Default 1.")] = None
    top_p: Probability | None = None
    top_k: Annotated[TopK | None, Meta(description="-1 and 0 mean off.")] = None
    min_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    stop: Annotated[
        Union[StopString, Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)], None],  # noqa: UP007
        Meta(description="Text that ends the output; not part of it unless no_stop_trim is true."),
    ] = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[Annotated[int, Meta(ge=1, le=128)] | None, Meta(description="Outputs per prompt.")] = None
    sampling_seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class GenerateBody(CommonFields, kw_only=True):
    """POST /generate. What may be a list has one entry per prompt."""

    text: Annotated[str | list[str] | None, Meta(description="The prompt(s).")] = None
    input_ids: Annotated[
        list[Union[TokenId, list[TokenId]]] | None,  # noqa: UP007
        Meta(description="Token ids that stand in for text."),
    ] = None
    sampling_params: SamplingFields | list[SamplingFields] | None = None
    rid: Annotated[
        Annotated[str, Meta(pattern=r"^[!-~]{1,256}$(?!\n)")] | None,
        Meta(description="Another name of request_id; several sequences are rid#0, rid#1, ..."),
    ] = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Annotated[
        LogprobStart | list[LogprobStart] | None, Meta(description="First prompt token whose log-probability is returned; -1 (default): none.")
    ] = None
    top_logprobs_num: TopCount | list[TopCount] | None = None
    return_text_in_logprobs: bool | None = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events, each with all of the output so far.")] = None
    extra_key: Annotated[Annotated[str, Meta(max_length=256)] | None, Meta(description="Another name of cache_salt.")] = None


# (log-probability, token id, text or null)
LogprobEntry = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct, kw_only=True):
    """``finish_reason`` is null while the output grows."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET


class GenerateReply(msgspec.Struct, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
