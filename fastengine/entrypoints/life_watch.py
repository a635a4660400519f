"""LifeWatch: notices a process of the instance that was stopped, or hangs where its own watchdog can't tell.

Each process watches its own threads (:mod:`fastengine.observability.watchdog`); a process that is stopped as a whole
(SIGSTOP, a frozen container) can't. So a few times per ``--watchdog-timeout`` the supervisor asks each of them for a
sign of life. Only what is certain counts as hanging: for the whole timeout it neither answered nor used the CPU. One
that waits answers; one that loads, computes or is short of CPU on a busy machine uses it; one that a debugger holds
is left alone; and when the supervisor itself has slept (the machine was suspended), that counts as one round.

::

    round       0        1        2        3        4
    answered    yes      no       no       no       no  -> hangs
    stopped        ^SIGSTOP
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fastengine.ipc.life_signs import LifeSigns

ROUNDS_PER_TIMEOUT = 4
# What a process that is not stopped may be silent for beyond the timeout: the engine may wait that long for workers to end.
WAITING_MARGIN_S = 20.0
# How long a hanging process gets to write where its threads stand.
LAST_WORDS_S = 0.5
STOPPED, TRACED = "T", "t"


@dataclass(frozen=True)
class Subject:
    """A process to look after: ``place`` is its own among the life signs, ``ask`` sends it a check of that number."""

    name: str
    pid: int
    place: int
    ask: Callable[[int], None]


@dataclass
class _Observed:
    pid: int
    last_answer: int
    has_answered: bool = False  # ever: one that still starts isn't judged
    cpu_ticks: int = -1
    silent_rounds: int = 0


@dataclass(frozen=True)
class ProcessLook:
    """What the kernel says of a process: its state's letter, and the CPU it has used in clock ticks."""

    state: str
    cpu_ticks: int


def look_at(pid: int) -> ProcessLook | None:
    """None when there is no such process any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessLook(fields[0], int(fields[11]) + int(fields[12]))


def is_pending(pid: int, signum: signal.Signals) -> bool:
    """Whether a signal to the process waits to be handled, as all do that reach a stopped one. Raises ProcessLookupError."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        raise ProcessLookupError from None
    pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
    return bool(pending >> (signum - 1) & 1)


class LifeWatch:
    """Call :meth:`round` whenever :attr:`due_at` has come. ``timeout_s`` 0 watches nothing."""

    def __init__(
        self,
        signs: LifeSigns,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[int], ProcessLook | None] = look_at,
    ):
        self._signs = signs
        self._timeout_s = timeout_s
        self._period_s = timeout_s / ROUNDS_PER_TIMEOUT
        self._clock = clock
        self._look = look
        self._observed: dict[str, _Observed] = {}
        self._number = 0
        self.due_at: float | None = clock() + self._period_s if timeout_s else None

    @property
    def is_due(self) -> bool:
        return self.due_at is not None and self._clock() >= self.due_at

    def round(self, subjects: Iterable[Subject]) -> list[tuple[Subject, str]]:
        """Look at everybody and ask anew; returns those that hang, each with what to say of it."""
        # Counted from now, not from when it was due: time that this process itself has slept through is nobody's fault.
        self.due_at = self._clock() + self._period_s
        hanging = []
        for subject in subjects:
            look = self._look(subject.pid)
            if look is None:
                continue  # its end is reported elsewhere
            observed = self._observed.get(subject.name)
            if observed is None or observed.pid != subject.pid:
                observed = self._observed[subject.name] = _Observed(subject.pid, self._signs.last(subject.place))
            elif self._is_silent(observed, subject, look):
                observed.silent_rounds += 1
                if observed.silent_rounds >= self._most_rounds(look):
                    hanging.append((subject, self._reason(subject, look)))
            else:
                observed.silent_rounds = 0
            observed.cpu_ticks = look.cpu_ticks
            # Every time, not only after an answer: any of these messages may be lost.
            self._number += 1
            subject.ask(self._number)
        return hanging

    def _is_silent(self, observed: _Observed, subject: Subject, look: ProcessLook) -> bool:
        answer = self._signs.last(subject.place)
        if answer != observed.last_answer:
            observed.last_answer, observed.has_answered = answer, True
            return False
        return observed.has_answered and look.cpu_ticks == observed.cpu_ticks and look.state != TRACED

    def _most_rounds(self, look: ProcessLook) -> int:
        margin = 0.0 if look.state == STOPPED else WAITING_MARGIN_S
        return math.ceil((self._timeout_s + margin) / self._period_s)

    def _reason(self, subject: Subject, look: ProcessLook) -> str:
        state = "was stopped" if look.state == STOPPED else f"is in state {look.state}"
        return f"it {state} and has neither answered nor used the CPU for --watchdog-timeout {self._timeout_s:g} s"


def end_hanging(pid: int) -> None:
    """Kill a process that hangs, after it had a moment to write to its stderr where its threads stand.

    A stopped process can't say anything: it is continued for that moment. If its own watchdog ran out meanwhile it says it
    by itself, once it goes on, and dies; asked to do so twice, one thread would end it while another is still writing.
    """
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if not is_pending(pid, signal.SIGALRM):
                os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            ended.poll(LAST_WORDS_S * 1000)
            os.kill(pid, signal.SIGKILL)
        finally:
            os.close(handle)
