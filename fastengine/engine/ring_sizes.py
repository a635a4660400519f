"""How large the rings between engine and workers must be for the largest plans and results a configuration allows."""

from __future__ import annotations

from fastengine.config import EngineConfig
from fastengine.engine.admitter import MAX_STARTED_BYTES
from fastengine.engine.request_state import ModelLimits
from fastengine.ipc.worker_link import MIN_RING_BYTES, RingSizes
from fastengine.sampling_rules import MAX_TOP_LOGPROBS

TOKEN_BYTES = 4
# What a plan or result has beside what is counted here: columns of slots, names, errors.
OTHER_BYTES = 1 << 20
# MessagePack: at most 5 bytes an integer or array, 9 a float.
LOGPROBS_BYTES = 5 + 9 + 5 + 5 + 5 + MAX_TOP_LOGPROBS * (5 + 9)
# A sequence's slot, token and array headers.
ROW_BYTES = 64
# One message may take half a ring.
PARTS_OF_PLANS = 2
# With overlap two results may be unread, and neither may wrap around the end.
PARTS_OF_RESULTS = 4
PAGE_BYTES = 4096


def ring_sizes(config: EngineConfig, limits: ModelLimits) -> RingSizes:
    """Both at least MIN_RING_BYTES; a ring's file takes memory only as far as it is used."""
    scheduler = config.scheduler
    # The first sequence that a plan starts is in it however long it is.
    longest = TOKEN_BYTES * limits.max_model_len * (1 + 1 / config.cache.block_size)
    plan = max(MAX_STARTED_BYTES, int(longest) + OTHER_BYTES) + OTHER_BYTES
    rows = scheduler.max_num_seqs * (ROW_BYTES + LOGPROBS_BYTES + 4 * limits.hidden_size)
    result = scheduler.token_budget * LOGPROBS_BYTES + rows + OTHER_BYTES
    return RingSizes(_pages(PARTS_OF_PLANS * plan), _pages(PARTS_OF_RESULTS * result))


def _pages(size: int) -> int:
    return max(MIN_RING_BYTES, -(-size // PAGE_BYTES) * PAGE_BYTES)
