"""RunLength: how many steps of plain decoding one plan may hold."""

from __future__ import annotations

from fastengine.protocol.steps import MAX_RUN_STEPS

# What the latest measurement counts against those before it.
NEWEST_SHARE = 0.25


class RunLength:
    """As many steps as come nearest to a time budget, by the time that steps of that many sequences have lately taken.

    That time depends on the number of sequences first of all: each has an average of its own. Nearest, since many
    sequences have long steps, of which hardly two fit in, and many streams to send each step's tokens to.
    """

    def __init__(self, budget_ms: float, max_num_seqs: int):
        """``budget_ms`` 0: one step a plan."""
        self._budget_us = budget_ms * 1000
        self._step_us = [0.0] * (max_num_seqs + 1)  # by number of sequences; 0: not measured yet

    def most_steps(self, num_seqs: int) -> int:
        """1 to MAX_RUN_STEPS; 1 for a number of sequences that nothing is known of."""
        step_us = self._step_us[num_seqs]
        if not step_us:
            return 1
        return max(1, min(MAX_RUN_STEPS, round(self._budget_us / step_us)))

    def observe(self, num_seqs: int, num_steps: int, duration_us: int) -> None:
        """``num_steps`` decodes of ``num_seqs`` sequences have taken ``duration_us``."""
        measured, known = duration_us / num_steps, self._step_us[num_seqs]
        self._step_us[num_seqs] = known + (measured - known) * NEWEST_SHARE if known else measured
