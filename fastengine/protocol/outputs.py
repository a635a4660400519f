"""Engine -> API process: one message per process and step, or run of steps."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_STOP: Literal["stop"] = "stop"
FINISH_LENGTH: FinishReason = "length"
FINISH_ABORT: Literal["abort"] = "abort"
FINISH_ERROR: FinishReason = "error"


# Why a request_id is refused, whoever notices: its API process, or the engine when the other request is another process's.
DUPLICATE_ID = "duplicate_request_id"
# A grammar is to blame, whoever notices: the API process and the workers before it is used, the workers on the way.
INVALID_GRAMMAR = "invalid_grammar"


class EngineError(msgspec.Struct, frozen=True):
    """Why something failed, ready for an HTTP reply.

    ``code`` is an HTTP status (400, 404, 409, 429, 499, 500, 503, 504); ``param`` names the caller's
    own field where one is to blame; ``retry_after_s`` becomes a ``Retry-After`` header; ``reason`` is the machine-readable
    code of OpenAI's error object, where there is one beside the status's own.
    """

    code: int
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    reason: str | None = None


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the sampled (or prompt) token's and the top k's, best first."""

    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one sequence gained in one step, when it is more than a single plain token."""

    handle: int
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    # The token (EOS or one of stop_token_ids) that ended the sequence: the last of token_ids, not part of the text.
    stop_token_id: int | None = None
    logprobs: list[TopLogprobs] | None = None  # one per token id, if asked for
    prompt_logprobs: list[TopLogprobs | None] | None = None  # with the first output, if asked for
    num_cached_tokens: int | None = None  # prompt tokens served by the prefix cache; with the first output
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None  # with finish_reason: all of the sequence's, the stop token included
    weight_version: str | None = None  # with finish_reason
    error: EngineError | None = None  # with finish_reason "error"
    embedding: bytes | None = None  # float32 little-endian [hidden]; with the first output, if pooling was asked for


class OutputBatch(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    """All tokens of one step, or of a run of them, for one API process.

    Sequences that gained exactly ``num_steps`` plain tokens stand in the two columns ``handles`` (int64 little-endian [n])
    and ``token_ids`` (int32 little-endian [num_steps, n]); every other one in ``details``.
    """

    step_id: int  # the last one's
    handles: bytes
    token_ids: bytes
    details: list[TokenOutput] = []
    num_steps: int = 1


class EngineStatus(msgspec.Struct, frozen=True, tag="status", array_like=True):
    """The engine's own state, sent to every API process when it changes and in answer to a hello.

    ``state`` is one of ``starting, ready, recovering, stopping, failed``; ``progress`` is 0..1 while
    starting. ``has_report``: the engine failed and could write its crash report itself. ``log_level``: what somebody has
    set since, for all processes; None: nobody has. ``needs_operator``: it is paused, and no command under way could change that.
    """

    state: Literal["starting", "ready", "recovering", "stopping", "failed"]
    message: str = ""
    progress: float = 0.0
    paused: bool = False
    sleeping: bool = False
    weight_version: str = ""
    num_blocks: int = 0
    has_report: bool = False
    log_level: str | None = None
    needs_operator: bool = False
