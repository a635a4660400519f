"""How each slot samples: plain numbers in columns, and rules only for the few slots that have any."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import RowError, StartedSequence
from fastengine.protocol.tokens import unpack_token_ids
from fastengine.sampling_rules import SamplingError, check_sampling
from fastengine.worker.grammar import SlotGrammars
from fastengine.worker.row_problems import BAD_REQUEST, grammar_problem

POOLING_NONE, POOLING_MEAN, POOLING_LAST = range(3)
POOLINGS = {None: POOLING_NONE, "mean": POOLING_MEAN, "last": POOLING_LAST}


@dataclass
class SlotRules:
    """Changes to a slot's logits that need a look at its tokens or at single vocabulary entries."""

    bias_ids: np.ndarray  # int32[n]
    bias_values: np.ndarray  # float32[n]
    min_tokens: int
    end_ids: np.ndarray  # int32[e]: forbidden until min_tokens are there
    bad_words: tuple[tuple[int, ...], ...]


class SamplingTable:
    """One row per slot. ``has_rules``, ``penalized`` and ``constrained`` say which slots need more than their numbers.

    ``grammars`` None means that nothing can follow a grammar here.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...], grammars: SlotGrammars | None = None):
        self.vocab_size = vocab_size
        self.grammars = grammars
        self._eos_token_ids = eos_token_ids
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.repetition_penalty = np.ones(max_num_seqs, dtype=np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        # -1: none; 0: the sampled token's alone; k: the k most likely beside it.
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)
        self.pooling = np.zeros(max_num_seqs, dtype=np.int8)  # POOLING_*
        self.has_rules = np.zeros(max_num_seqs, dtype=bool)
        self.penalized = np.zeros(max_num_seqs, dtype=bool)
        self.constrained = np.zeros(max_num_seqs, dtype=bool)  # by a grammar or a reasoning budget
        # Any of the three: the one look that steps without any of this take.
        self.adjusted = np.zeros(max_num_seqs, dtype=bool)
        self.rules: dict[int, SlotRules] = {}

    def release(self, slots: np.ndarray) -> None:
        for slot in slots[self.has_rules[slots]].tolist():
            del self.rules[slot]
        if self.grammars is not None:
            for slot in slots[self.constrained[slots]].tolist():
                self.grammars.release(slot)
        self.has_rules[slots] = False
        self.penalized[slots] = False
        self.constrained[slots] = False
        self.adjusted[slots] = False

    def start(self, sequence: StartedSequence) -> RowError | None:
        """Take a sequence's parameters; an error means they can't be followed."""
        params, slot = sequence.sampling, sequence.slot
        try:
            # Whoever made the request has checked it; what slipped through must not reach the operators.
            check_sampling(params, self.vocab_size)
        except SamplingError as error:
            return RowError(slot, BAD_REQUEST, str(error))
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = sequence.seed
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.pooling[slot] = POOLINGS[params.pooling]
        self.penalized[slot] = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.has_rules[slot] = bool(params.logit_bias or params.min_tokens or params.bad_words_token_ids)
        self.adjusted[slot] = self.penalized[slot] or self.has_rules[slot]
        if self.has_rules[slot]:
            self.rules[slot] = self._rules(params)
        if params.grammar is not None or params.reasoning is not None:
            return self._constrain(sequence)
        return None

    def _constrain(self, sequence: StartedSequence) -> RowError | None:
        params, slot = sequence.sampling, sequence.slot
        if self.grammars is None:
            return RowError(slot, *grammar_problem("structured output is not supported by the null model"))
        output_ids = unpack_token_ids(sequence.token_ids)[sequence.num_prompt :].tolist()
        problem = self.grammars.start(slot, params.grammar, params.reasoning, self._end_ids(params), output_ids)
        if problem is not None:
            return RowError(slot, *grammar_problem(problem))
        self.constrained[slot] = self.adjusted[slot] = True
        return None

    def _end_ids(self, params: SamplingParams) -> list[int]:
        return sorted({i for i in (*self._eos_token_ids, *params.stop_token_ids) if 0 <= i < self.vocab_size})

    def _rules(self, params: SamplingParams) -> SlotRules:
        return SlotRules(
            bias_ids=np.fromiter(params.logit_bias.keys(), dtype=np.int32),
            bias_values=np.fromiter(params.logit_bias.values(), dtype=np.float32),
            min_tokens=params.min_tokens,
            end_ids=np.array(self._end_ids(params), dtype=np.int32),
            bad_words=params.bad_words_token_ids,
        )
