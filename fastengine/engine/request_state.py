"""RequestState: everything the engine knows of one request, and the one table of them."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastengine.cache.kv_cache_manager import SequenceBlocks
from fastengine.config import EngineConfig, require
from fastengine.model_files.spec import ModelSpec
from fastengine.protocol.outputs import FinishReason, TopLogprobs
from fastengine.protocol.requests import GenerateRequest
from fastengine.protocol.tokens import unpack_token_ids
from fastengine.sampling_rules import sampling_bytes

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ModelLimits:
    """What the model allows: ``max_model_len`` tokens of prompt and output, ids below ``vocab_size``."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    hidden_size: int = 0  # of an embedding

    @staticmethod
    def of(config: EngineConfig, spec: ModelSpec) -> ModelLimits:
        """The model's own limits, the length cut to ``--max-model-len``. Raises ConfigError when that is longer."""
        length = config.model.max_model_len or spec.max_position_embeddings
        require(
            length <= spec.max_position_embeddings, "max_model_len", f"{length} exceeds the model's context length, {spec.max_position_embeddings}"
        )
        return ModelLimits(length, spec.vocab_size, spec.eos_token_ids, spec.hidden_size)


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # never ran
    RUNNING = "running"  # has a slot and blocks
    PREEMPTED = "preempted"  # ran, gave up slot and blocks, will be recomputed
    WAITING_KV = "waiting_kv"  # waits until KV of its prefix has been brought into blocks it holds
    FINISHED = "finished"


# Aborts and errors may end a request in any state; nothing leaves FINISHED.
LEGAL_TRANSITIONS = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.WAITING_KV, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.WAITING_KV, RequestStatus.FINISHED},
    RequestStatus.WAITING_KV: {RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


class IllegalTransition(RuntimeError):
    pass


class RequestState:
    """One sequence, from intake to finish.

    While it is RUNNING its tokens and counters stand in its slot (see :mod:`fastengine.engine.slots`);
    otherwise in ``tokens``: the prompt, then the output so far.
    """

    __slots__ = (
        "arrival_number",
        "arrived_at",
        "blocks",
        "bypassed",
        "embedding",
        "end",
        "finish_reason",
        "first_token_at",
        "looked_on_disk",
        "num_cached",
        "num_preemptions",
        "num_prompt",
        "num_tokens_at_start",
        "prefill_at",
        "prompt_logprobs",
        "request",
        "request_id",
        "restored",
        "sampling_bytes",
        "seed",
        "slot",
        "started_at",
        "status",
        "strikes",
        "tokens",
    )

    def __init__(self, request: GenerateRequest, *, arrival_number: int, arrived_at: float, end: int, seed: int):
        self.request = request
        self.request_id = request.request_id
        self.arrival_number = arrival_number
        self.arrived_at = arrived_at  # seconds of the engine's clock
        self.tokens: Tokens = unpack_token_ids(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.end = end  # most tokens it may have, prompt and output
        self.seed = seed
        self.sampling_bytes = sampling_bytes(request.sampling)  # of the plan that starts it, at most
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.blocks = SequenceBlocks()
        self.slot = -1
        # While its known tokens are being prefilled: next position, and how many tokens there are.
        self.prefill_at = 0
        self.num_tokens_at_start = 0
        self.num_cached: int | None = None  # prompt tokens found in the prefix cache when it first started
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.prompt_logprobs: list[TopLogprobs] = []
        self.embedding: bytes | None = None
        self.restored = False  # it has waited in WAITING_KV since it last ran: it won't again
        self.looked_on_disk = False  # its prefix has been looked for in files since it last ran
        self.bypassed = 0  # requests that were admitted past it
        self.num_preemptions = 0
        self.strikes = 0  # worker crashes in a row that it took part in

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def wants_logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    @property
    def needs_whole_prompt(self) -> bool:
        """Every position of the prompt must be computed: what is cached has neither log-probabilities nor hidden states."""
        return self.first_token_at is None and (self.wants_prompt_logprobs or self.request.sampling.pooling is not None)

    def transition(self, to: RequestStatus) -> None:
        """Change state. Raises IllegalTransition."""
        if to not in LEGAL_TRANSITIONS[self.status]:
            raise IllegalTransition(f"request {self.request_id}: {self.status.name} -> {to.name}")
        self.status = to


class RequestTable:
    """All live requests, by their own id, by their client's handle and by their parent's id."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestState] = {}
        self._by_handle: dict[tuple[int, int], RequestState] = {}
        self._by_parent: dict[str, dict[str, RequestState]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, state: RequestState) -> None:
        request = state.request
        self._by_id[state.request_id] = state
        self._by_handle[request.client_index, request.handle] = state
        if request.parent_id is not None:
            self._by_parent.setdefault(request.parent_id, {})[state.request_id] = state

    def remove(self, state: RequestState) -> None:
        request = state.request
        del self._by_id[state.request_id]
        del self._by_handle[request.client_index, request.handle]
        if request.parent_id is not None:
            siblings = self._by_parent[request.parent_id]
            del siblings[state.request_id]
            if not siblings:
                del self._by_parent[request.parent_id]

    def by_handle(self, client_index: int, handle: int) -> RequestState | None:
        return self._by_handle.get((client_index, handle))

    def by_client(self, client_index: int) -> list[RequestState]:
        return [state for state in self if state.request.client_index == client_index]

    def named(self, request_id: str) -> list[RequestState]:
        """The request of exactly this id, or the children of the parent of exactly this id."""
        own = self._by_id.get(request_id)
        return [own] if own is not None else list(self._by_parent.get(request_id, {}).values())

    def count(self, *statuses: RequestStatus) -> int:
        return sum(1 for state in self if state.status in statuses)
