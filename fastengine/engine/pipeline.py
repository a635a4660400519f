"""Pipeline: the plans that workers have been given and not answered, oldest first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fastengine.engine.request_state import RequestState
from fastengine.engine.slots import DecodeBatch


class UnexpectedResult(RuntimeError):
    """A result that no step in flight has asked for: engine and workers no longer agree."""


@dataclass(slots=True)
class InFlightStep:
    """One published plan, as far as its results must be understood: one step, or the steps of a run that are not answered.

    Rows of a result are ``batch`` (in its order), then ``samplers``.
    """

    step_id: int  # of the first of them
    batch: DecodeBatch
    # Slots of ``batch`` that reach their last token in this step (max_tokens or the model's length).
    last_slots: list[int]
    # Slots whose chunk ends at their last known token, so that they sample, too.
    samplers: list[tuple[int, RequestState]]
    expected_slots: bytes  # int32[rows]
    chunked: list[tuple[int, RequestState]]  # all slots with a chunk, samplers among them
    num_tokens: int  # of one step
    published_at: float
    num_steps: int = 1
    is_run: bool = False
    is_cut: bool = False  # the workers are asked not to begin any more of its steps
    # Slots whose sequence has ended or left since: their rows mean nothing any more.
    dead: set[int] = field(default_factory=set)


class Pipeline:
    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        """Plans in flight."""
        return len(self._steps)

    @property
    def num_steps(self) -> int:
        return sum(step.num_steps for step in self._steps)

    @property
    def oldest(self) -> InFlightStep | None:
        return self._steps[0] if self._steps else None

    def push(self, step: InFlightStep) -> None:
        self._steps.append(step)

    def pop(self, step_id: int, num_steps: int = 1) -> InFlightStep:
        """Take ``num_steps`` steps off the oldest plan, whose next one must be ``step_id``; returns it. Raises UnexpectedResult."""
        step = self.oldest
        if step is None or step.step_id != step_id or not 0 < num_steps <= step.num_steps:
            in_flight = [(step.step_id, step.num_steps) for step in self._steps]
            raise UnexpectedResult(f"result of step {step_id}, {num_steps} steps; in flight: {in_flight}")
        step.step_id += num_steps
        step.num_steps -= num_steps
        if not step.num_steps:
            self._steps.popleft()
        return step

    def take_cut(self, step_id: int, num_cut: int) -> None:
        """The oldest plan, a run whose next step is ``step_id``, ends here, without its last ``num_cut`` steps. Raises UnexpectedResult."""
        step = self.oldest
        if step is None or not step.is_cut or (step.step_id, step.num_steps) != (step_id, num_cut):
            raise UnexpectedResult(f"a run was cut by {num_cut} steps from {step_id} on, which nobody had asked for")
        self._steps.popleft()

    @property
    def may_be_cut(self) -> bool:
        """Whether :meth:`cut_runs` would find any."""
        return bool(self._steps) and self._steps[-1].is_run and not self._steps[-1].is_cut

    def cut_runs(self) -> int | None:
        """Have the runs end that nothing but runs has been planned after; the id of their last step.

        None when there are none, or all of them are cut already. A plan after a run counts on its steps.
        """
        if not self.may_be_cut:
            return None
        for step in reversed(self._steps):
            if not step.is_run:
                break
            step.is_cut = True
        return self._steps[-1].step_id + self._steps[-1].num_steps - 1

    @property
    def is_being_cut(self) -> bool:
        """How far the runs in flight will get is not known: nothing can be planned after them."""
        for step in self._steps:  # noqa: SIM110 - each turn asks, and a generator takes several times as long
            if step.is_cut:
                return True
        return False

    @property
    def is_for_nobody(self) -> bool:
        """Whether the newest plan is a run, and all of its sequences have ended or left."""
        if not self._steps or not self._steps[-1].is_run or not self._steps[-1].dead:
            return False
        return self._steps[-1].dead.issuperset(self._steps[-1].batch.slots.tolist())

    def mark_dead(self, slot: int) -> None:
        """Whatever the steps in flight yield for ``slot`` is no longer wanted."""
        for step in self._steps:
            step.dead.add(slot)

    def void(self) -> list[InFlightStep]:
        """The workers are gone: forget all steps and return them."""
        steps = list(self._steps)
        self._steps.clear()
        return steps
