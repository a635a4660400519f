"""Engine <-> worker, through the shared-memory rings.

A *slot* is a row of the worker's persistent batch: the engine names a slot when a sequence starts
and speaks of the slot alone from then on. Columns are packed little-endian arrays; their dtypes are
named beside each field.

A plan is applied in this order: ``released``, ``started``, ``grown``, then the forward pass over
``chunks`` (prefill) and ``decodes``::

    slot's tokens   |<------- num_computed ------->|<- chunk ->|   not scheduled yet   |
                    0                              start       start+length      num_tokens
                                                               ^ samples iff it reaches num_tokens

A decode row's input is the token its slot sampled last, which the worker knows: the engine may
publish plan k+1 before it has seen the result of plan k.

A plan of decodes alone may be a *run*: ``num_steps`` N means the same as N plans, ``step_id`` to ``step_id +
N - 1``, with the same ``decodes``, the differences applied before the first. Its results come in order, each for
one step or for several: one message for the whole run as long as nothing in it is unusual. While it is under way
the engine may have it cut short (the signal ``last_cut_step_id``): what was not begun is never computed.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fastengine.protocol.outputs import TopLogprobs
from fastengine.protocol.requests import SamplingParams

MAX_RUN_STEPS = 16


class StartedSequence(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence that enters the batch, new or recomputed after a preemption.

    ``token_ids`` is everything known (prompt, then output so far); the first ``num_prompt`` of it are
    the prompt. KV of the first ``num_computed`` tokens already stands in ``block_ids``.
    """

    slot: int
    token_ids: bytes  # int32[num_tokens]
    num_prompt: int
    num_computed: int
    block_ids: bytes  # int32[n]: the block table so far
    sampling: SamplingParams
    # The request's seed, or one the engine drew: the worker has no randomness of its own.
    seed: int = 0
    # Prompt log-probabilities are due for positions [1, num_prompt).
    request_id: str = ""  # for logs and error messages only


class StepPlan(msgspec.Struct, frozen=True, tag="plan", array_like=True, kw_only=True):
    """One step's work as a difference to what the worker already holds."""

    step_id: int
    released: bytes = b""  # int32[n]: slots that leave the batch
    started: list[StartedSequence] = []
    grown_slots: bytes = b""  # int32[m]: slots that gain one block each (a slot may repeat) ...
    grown_blocks: bytes = b""  # int32[m]: ... and the block, appended to the slot's table in this order
    decodes: bytes = b""  # int32[d]: slots that compute the one token they sampled last
    chunk_slots: bytes = b""  # int32[c]: slots that compute a piece of their known tokens:
    chunk_starts: bytes = b""  # int32[c]: its first position ...
    chunk_lengths: bytes = b""  # int32[c]: ... and length
    # KV blocks to move between the device pool and the host tier before the forward pass, as pairs.
    swap_out: bytes = b""  # int32[k, 2]: device block -> host block
    swap_in: bytes = b""  # int32[k, 2]: host block -> device block
    # Then, still before it, whole blocks within the device pool; none is both a source and a target.
    copies: bytes = b""  # int32[k, 2]: device block -> device block
    num_steps: int = 1  # of a run, at most MAX_RUN_STEPS; 1 for a plan with started sequences or chunks


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """One sequence that the worker could not go on with; the others of the step are unharmed."""

    slot: int
    code: int
    message: str
    reason: str | None = None  # as EngineError's


class SlotLogprobs(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    tokens: list[TopLogprobs]


class SlotEmbedding(msgspec.Struct, frozen=True, array_like=True):
    """A prompt's pooled hidden states, float32 little-endian [hidden], in the step that ends the prompt."""

    slot: int
    data: bytes


class StepResult(msgspec.Struct, frozen=True, tag="result", array_like=True, kw_only=True):
    """Rank 0's answer to a plan, or to the next ``num_steps`` N steps of a run. Rows are the slots that sampled: decodes, then finished chunks.

    With N > 1 there are token ids and times and nothing else, for every slot of the run. N is 0 where a run was cut
    before the next step.
    """

    step_id: int
    slots: bytes = b""  # int32[r]
    token_ids: bytes = b""  # int32[N, r]: the sampled token of each
    logprobs: list[SlotLogprobs] = []
    prompt_logprobs: list[SlotLogprobs] = []  # for the positions this step's chunks computed
    errors: list[RowError] = []
    forward_us: int = 0  # of all N steps
    sample_us: int = 0
    embeddings: list[SlotEmbedding] = []
    num_steps: int = 1  # N
    num_cut: int = 0  # steps of the run after these, which are not computed: the last result of a run that was cut


class WorkerCommand(msgspec.Struct, frozen=True, tag="command", array_like=True, kw_only=True):
    """Anything that is not a step, in order with the steps; every rank answers with a WorkerReply.

    ``name`` is one of ``init_cache, prepare_weights, commit_weights, discard_weights, load_weights,
    update_tensors, checksum, sleep, wakeup, profile, log_level, ping, shutdown, compile_grammar, store_blocks, load_blocks``; the arguments of each are
    documented at its handler in the worker. The last three are answered when they are done, other messages meanwhile.
    """

    command_id: int
    name: str
    args: dict[str, Any] = {}


class WorkerReply(msgspec.Struct, frozen=True, tag="reply", array_like=True, kw_only=True):
    command_id: int
    rank: int
    result: dict[str, Any] = {}
    error: str = ""  # empty means success
    error_code: int = 500
    error_param: str = ""  # the field of the caller's that is to blame, if it is one


class WorkerReady(msgspec.Struct, frozen=True, tag="ready", array_like=True, kw_only=True):
    """A rank has loaded its weights and can say how much KV memory there is."""

    rank: int
    pid: int
    device: str
    bytes_per_block: int
    num_blocks: int  # what fits by this rank's own measure
    compiled_ops: dict[str, str] = {}
    load_s: float = 0.0
    computes_runs: bool = False  # it gains by runs; every rank can take them


class WorkerFailure(msgspec.Struct, frozen=True, tag="failure", array_like=True, kw_only=True):
    """The last message of a rank that dies of an exception."""

    rank: int
    phase: Literal["start", "step", "command"]
    message: str
    traceback: str
    step_id: int = -1


ToWorker = StepPlan | WorkerCommand
FromWorker = StepResult | WorkerReply | WorkerReady | WorkerFailure
