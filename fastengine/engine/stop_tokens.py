"""StopTokens: which token ids may end a sequence, as an array that a whole batch is looked up in."""

from __future__ import annotations

import numpy as np

from fastengine.engine.request_state import ModelLimits, RequestState


class StopTokens:
    """Which token ids may end some running sequence: EOS, and the stop_token_ids of live requests."""

    def __init__(self, limits: ModelLimits):
        self._eos = frozenset(limits.eos_token_ids)
        # int32[vocab_size]: how many reasons there are to look at a row that sampled this token.
        self.reasons = np.zeros(limits.vocab_size, dtype=np.int32)
        for token_id in self._eos:
            if 0 <= token_id < limits.vocab_size:
                self.reasons[token_id] = 1

    def count(self, request: RequestState, change: int) -> None:
        """Count ``request``'s own stop tokens in (1) or out (-1)."""
        for token_id in set(request.request.sampling.stop_token_ids):
            if 0 <= token_id < len(self.reasons):
                self.reasons[token_id] += change

    def ends(self, request: RequestState, token_id: int, num_output: int) -> bool:
        """Whether ``token_id``, the ``num_output``-th of ``request``'s output, ends it."""
        sampling = request.request.sampling
        if num_output < sampling.min_tokens:
            return False
        return (token_id in self._eos and not sampling.ignore_eos) or token_id in sampling.stop_token_ids
