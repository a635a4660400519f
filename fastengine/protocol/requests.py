"""API process -> engine: what to generate, and what to stop generating."""

from __future__ import annotations

from typing import Literal

import msgspec

from fastengine.protocol.supervision import EngineCheck

# How hidden states become one vector: their mean over the prompt, or the last position's.
Pooling = Literal["mean", "last"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """What a structured output must match, already checked by the API process.

    ``kind`` is one of ``json_schema, json_object, regex, choice, lark, structural_tag``; ``source``
    is its canonical text (the JSON schema, the pattern, ...).
    """

    kind: str
    source: str


class ReasoningSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sequence's reasoning begins and ends; its grammar holds for what comes after.

    It begins with the prompt's end if ``starts_inside``, else with ``begin_token_id`` if that is the very
    first token. ``max_tokens`` tokens into it (begin marker not counted), the end marker is all that may come.
    """

    end_token_id: int
    begin_token_id: int | None = None
    starts_inside: bool = False
    max_tokens: int | None = None


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How one sequence is sampled.

    ``temperature`` 0 means greedy. ``top_k`` 0, ``top_p`` 1.0 and ``min_p`` 0.0 mean off. ``seed``
    makes a request reproducible whatever else is in the batch. ``logprobs`` is None for none, 0 for
    the sampled token's only, k for the k most likely beside it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    reasoning: ReasoningSpec | None = None
    pooling: Pooling | None = None  # the first output brings the prompt's embedding
    # Text-level fields: the API process (or LLM) acts on them; the engine never sees text.
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate", kw_only=True):
    """One sequence to generate: the engine's unit of work.

    A client request with ``n > 1`` arrives as n of these, each with its own ``request_id`` and the
    same ``parent_id``; they share the prompt's KV blocks through the prefix cache.
    """

    request_id: str
    # The sender and its own integer name for the request: outputs carry these two instead of the id.
    client_index: int
    handle: int
    prompt_token_ids: bytes  # int32 little-endian, see fastengine.protocol.tokens
    sampling: SamplingParams
    parent_id: str | None = None
    index: int = 0
    arrival_time_s: float = 0.0  # time.time() in the API process
    priority: int = 0  # lower runs first
    timeout_s: float | None = None  # from arrival; past it the request ends with an error
    cache_salt: str = ""
    adapter: str = ""
    trace_parent: str = ""  # W3C traceparent of the spans this request yields; empty unless they are wanted


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these sequences, named by the sender's own handles. Unknown handles are ignored.

    ``reason`` is what they count as: ``stop`` when the sender has found a stop string in their text.
    """

    client_index: int
    handles: list[int]
    reason: Literal["abort", "stop"] = "abort"


class ClientHello(msgspec.Struct, frozen=True, tag="hello"):
    """An API process (re)started: the engine drops what its predecessor of that index had running."""

    client_index: int
    pid: int


class ClientGone(msgspec.Struct, frozen=True, tag="gone"):
    """Sent by the supervisor when an API process died: all of its requests are aborted. ``reason`` is for the crash report."""

    client_index: int
    reason: str


ClientMessage = GenerateRequest | AbortRequest | ClientHello | ClientGone
IntakeMessage = ClientMessage | EngineCheck
