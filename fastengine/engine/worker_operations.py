"""Operations that need the workers, each a generator that reads from top to bottom.

A generator yields what it waits for and is resumed with the answer:

* ``Send(name, args)``: a command to all ranks -> the list of their replies
* ``WhenStopped()``: -> None once no step is in flight and none will be

It returns the ``result`` of the control response, or raises ControlError.

Commands sent here, and what each rank must do:

* ``prepare_weights {source, path, format, verify_checksum, must_be_whole}`` -> ``{"is_whole": bool}``: read and check
  everything (``source`` is ``checkpoint`` or ``tensors``, ``path`` None the served model) and change nothing that
  serves; whole is what replaces every tensor
* ``commit_weights {}``: copy what was prepared into place; ``discard_weights {}``: forget it
* ``checksum {}`` -> ``{"checksum": str}``; ``profile {action, output_dir}``; ``log_level {level}``
* ``compile_grammar {kind, source}``: in the background, without touching what runs
* ``sleep {tags}`` and ``wakeup {tags}``: give memory back to the system, and take it again
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from fastengine.engine.lifecycle import Lifecycle
from fastengine.engine.resource_manager import ResourceManager
from fastengine.engine.run_state import RunState
from fastengine.engine.worker_commands import NO_RANK, Replies
from fastengine.observability.metrics import EngineMetrics
from fastengine.protocol.control import PrepareGrammar, Profile, SetLogLevel, Sleep, UpdateWeights, UpdateWeightsFromTensors, Wakeup
from fastengine.protocol.outputs import EngineError

MEMORY_TAGS = ("weight", "kv_cache")


class ControlError(Exception):
    """The command can't be done; ``error`` goes to whoever asked."""

    def __init__(self, code: int, message: str, *, param: str | None = None):
        super().__init__(message)
        self.error = EngineError(code, message, param)


@dataclass(frozen=True)
class Send:
    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WhenStopped:
    pass


@dataclass
class Progress:
    """What the runner and a running operation tell each other."""

    expired: bool = False  # its caller has been answered with 504
    is_final: bool = False  # told by the operation: it can't be given up any more


Result = dict[str, Any]
Operation = Generator["Send | WhenStopped", Any, Result]


def raise_on_error(replies: Replies) -> None:
    """Raise ControlError for the first rank that failed, naming it."""
    for reply in replies:
        if reply.error:
            message = reply.error if reply.rank == NO_RANK else f"rank {reply.rank}: {reply.error}"
            raise ControlError(reply.error_code, message, param=reply.error_param or None)


class WorkerOperations:
    """Weights and memory of the workers, and what follows from their changes in the engine."""

    def __init__(self, resources: ResourceManager, lifecycle: Lifecycle, run_state: RunState, metrics: EngineMetrics):
        self._resources = resources
        self._lifecycle = lifecycle
        self._run_state = run_state
        self._metrics = metrics
        self.sleeping: set[str] = set()
        self.log_level: str | None = None  # None: as configured
        # What has been applied on top of the weights that workers load when they start.
        self._applied: list[dict[str, Any]] = []
        # Why the weights of restarted workers are not the ones that should serve; None: they are.
        self.fault: str | None = None

    # -- weights --------------------------------------------------------------------------------

    def update_weights(self, command: UpdateWeights | UpdateWeightsFromTensors, progress: Progress) -> Operation:
        """All ranks or none: prepared everywhere, then committed everywhere."""
        if isinstance(command, UpdateWeights) and command.stop_first is not None:
            return (yield from self._stop_and_update(command, command.stop_first, progress))
        return (yield from self._update(command, progress))

    def _stop_and_update(self, command: UpdateWeights, mode: Literal["drain", "abort"], progress: Progress) -> Operation:
        """Stop for the update alone: afterwards, whether it worked or not, the engine runs if it ran before and nobody pauses it."""
        was_stopped = self._run_state.is_stopped
        if mode == "abort":
            self._lifecycle.abort_all()
            self._run_state.halt(retract=False)
        else:
            self._run_state.drain()
        try:
            yield WhenStopped()
            if progress.expired:
                raise ControlError(504, "the engine did not come to rest in time; the old weights serve")
            return (yield from self._update(command, progress))
        finally:
            if not was_stopped and not self._run_state.held and self.fault is None:
                self._run_state.run()

    def _update(self, command: UpdateWeights | UpdateWeightsFromTensors, progress: Progress) -> Operation:
        if not self._run_state.is_stopped:
            raise ControlError(409, "weights can only be updated while the engine is paused")
        if "weight" in self.sleeping:
            raise ControlError(409, "the weights are asleep: wake them up first")
        args = _source(command, must_be_whole=self.fault is not None)
        try:
            replies: Replies = yield Send("prepare_weights", args)
            raise_on_error(replies)
            if progress.expired:
                raise ControlError(504, "the update took too long and was given up; the old weights serve")
        except ControlError as failure:
            yield Send("discard_weights")
            raise (self._lost(args, failure) if failure.error.code == 503 else failure) from None
        progress.is_final = True
        try:
            raise_on_error((yield Send("commit_weights")))
        except ControlError as failure:
            if failure.error.code != 503:
                # Ranks may now hold different weights. Nothing may run until an update succeeds.
                self.fault = f"an update of the weights failed half way: {failure}"
                raise
            raise self._lost(args, failure) from None
        previous = self._lifecycle.weight_version
        self._weights_changed(args, all(reply.result["is_whole"] for reply in replies), command.version, keep_kv=command.keep_kv)
        return {"weight_version": self._lifecycle.weight_version, "previous_weight_version": previous}

    def _lost(self, args: dict[str, Any], failure: ControlError) -> ControlError:
        """The files may be why: one that is cut short while it is read ends a rank without a word."""
        source = args["path"] or "the served model"
        return ControlError(503, f"{failure}; {source} was not loaded, and version {self._lifecycle.weight_version} is loaded again")

    def _weights_changed(self, args: dict[str, Any], is_whole: bool, version: str | None, *, keep_kv: bool) -> None:
        self._applied = [args] if is_whole else [*self._applied, args]
        self.fault = None
        self._resources.new_weights(keep_kv=keep_kv)
        # A made-up name must not be one that somebody has given, or will.
        self._lifecycle.weight_version = version or f"update-{self._resources.weights_epoch}-{secrets.token_hex(4)}"
        self._metrics.counters["weight_updates"] += 1

    def checksum(self) -> Operation:
        if self.fault is not None:  # what the workers hold is not what the version's name says
            raise ControlError(409, f"{self.fault}; update the weights first")
        if "weight" in self.sleeping:
            raise ControlError(409, "the weights are asleep: wake them up first")
        replies: Replies = yield Send("checksum")
        raise_on_error(replies)
        found = {reply.result["checksum"] for reply in replies}  # of the whole model, so the same on every rank
        if len(found) > 1:
            raise ControlError(500, f"the ranks hold different weights: {sorted(found)}; update the weights again")
        return {"weight_version": self._lifecycle.weight_version, "checksum": found.pop()}

    # -- memory ---------------------------------------------------------------------------------

    def sleep(self, command: Sleep, progress: Progress) -> Operation:
        tags = _checked_tags(command.tags) - self.sleeping
        was_stopped = self._run_state.is_stopped
        if tags:
            self._run_state.halt(retract="kv_cache" in tags)
            yield WhenStopped()
            try:
                if progress.expired:
                    raise ControlError(504, "the engine did not come to rest in time; it is running")
                progress.is_final = True
                raise_on_error((yield Send("sleep", {"tags": sorted(tags)})))
            except ControlError as failure:
                if failure.error.code not in (503, 504):
                    yield Send("wakeup", {"tags": sorted(tags)})
                if not was_stopped and not self._run_state.held:
                    self._run_state.run()
                if failure.error.code == 503:
                    raise ControlError(503, f"{failure}; nothing was put to sleep") from None
                raise
            self.sleeping |= tags
            if "kv_cache" in tags:
                self._resources.flush()
        return {"sleeping": sorted(self.sleeping)}

    def wakeup(self, command: Wakeup, progress: Progress) -> Operation:
        tags = _checked_tags(command.tags) & self.sleeping
        if tags:
            progress.is_final = True
            try:
                raise_on_error((yield Send("wakeup", {"tags": sorted(tags)})))
            except ControlError as failure:
                raise ControlError(failure.error.code, f"{failure}; still asleep: {', '.join(sorted(self.sleeping))}") from None
            self.sleeping -= tags
            if not self.sleeping and self.fault is None:
                self._run_state.run()
        return {"sleeping": sorted(self.sleeping)}

    # -- tools ----------------------------------------------------------------------------------

    def profile(self, command: Profile) -> Operation:
        replies: Replies = yield Send("profile", {"action": command.action, "output_dir": command.output_dir})
        raise_on_error(replies)
        return {"ranks": [{"rank": reply.rank, **reply.result} for reply in replies]}

    def set_log_level(self, command: SetLogLevel) -> Operation:
        raise_on_error((yield Send("log_level", {"level": command.level})))
        self.log_level = command.level
        return {"level": command.level}

    def prepare_grammar(self, command: PrepareGrammar) -> Operation:
        raise_on_error((yield Send("compile_grammar", {"kind": command.grammar.kind, "source": command.grammar.source})))
        return {}

    # -- restart --------------------------------------------------------------------------------

    @property
    def must_restore(self) -> bool:
        return bool(self._applied or self.sleeping or self.log_level)

    def restore(self) -> Operation:
        """Bring workers that have just started to the state their predecessors were in."""
        if self.log_level is not None:
            raise_on_error((yield Send("log_level", {"level": self.log_level})))
        for args in self._applied:
            try:
                raise_on_error((yield Send("prepare_weights", args)))
                raise_on_error((yield Send("commit_weights")))
            except ControlError as failure:
                if failure.error.code != 503:  # 503: these workers died, too, and the next ones are tried again
                    self.fault = f"the workers were restarted and version {self._lifecycle.weight_version} can't be loaded again: {failure}"
                    self._run_state.halt(retract=True)
                raise
        if self.sleeping:
            raise_on_error((yield Send("sleep", {"tags": sorted(self.sleeping)})))
        return {}


def _source(command: UpdateWeights | UpdateWeightsFromTensors, *, must_be_whole: bool) -> dict[str, Any]:
    """``must_be_whole``: what the workers hold is not what single tensors would be meant for."""
    if isinstance(command, UpdateWeights):
        source = {"source": "checkpoint", "path": command.model_path, "format": command.format, "verify_checksum": command.verify_checksum}
        return {**source, "must_be_whole": True}
    return {"source": "tensors", "path": command.path, "format": "safetensors", "verify_checksum": None, "must_be_whole": must_be_whole}


def _checked_tags(tags: tuple[str, ...]) -> set[str]:
    unknown = set(tags) - set(MEMORY_TAGS)
    if unknown or not tags:
        raise ControlError(400, f"tags must be some of {', '.join(MEMORY_TAGS)}; got {list(tags)}", param="tags")
    return set(tags)
