"""Operators' commands, and what API processes ask beside requests: on a channel of their own, answered between two steps."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fastengine.protocol.outputs import EngineError, EngineStatus, OutputBatch
from fastengine.protocol.requests import GrammarSpec

PauseMode = Literal["abort", "drain", "retract", "in_place"]
MemoryTag = Literal["weight", "kv_cache"]


class Pause(msgspec.Struct, frozen=True, tag="pause", kw_only=True):
    """Stop stepping; true on every rank when answered. The modes are defined in docs/control-api.md."""

    mode: PauseMode = "abort"
    timeout_s: float = 60.0


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    pass


class IsPaused(msgspec.Struct, frozen=True, tag="is_paused"):
    pass


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights", kw_only=True):
    """Replace the weights in place, all ranks or none; refused with 409 unless paused.

    ``model_path`` None reloads the served path. ``keep_kv`` lets requests kept by an ``in_place``
    pause go on over KV computed by the old weights. ``stop_first``: pause for the update and go on after it.
    """

    model_path: str | None = None
    version: str | None = None
    format: Literal["auto", "safetensors", "gguf"] = "auto"
    verify_checksum: str | None = None
    keep_kv: bool = False
    stop_first: Literal["drain", "abort"] | None = None
    timeout_s: float = 600.0


class UpdateWeightsFromTensors(msgspec.Struct, frozen=True, tag="update_tensors", kw_only=True):
    """New values of named tensors, in a safetensors file a trainer left in shared memory."""

    path: str
    version: str | None = None
    keep_kv: bool = False
    timeout_s: float = 600.0


class WeightsChecksum(msgspec.Struct, frozen=True, tag="weights_checksum"):
    pass


class Sleep(msgspec.Struct, frozen=True, tag="sleep", kw_only=True):
    """Pause and give the named memory back to the system."""

    tags: tuple[MemoryTag, ...] = ("weight", "kv_cache")
    timeout_s: float = 60.0


class Wakeup(msgspec.Struct, frozen=True, tag="wakeup", kw_only=True):
    tags: tuple[MemoryTag, ...] = ("weight", "kv_cache")
    timeout_s: float = 600.0


class AbortRequests(msgspec.Struct, frozen=True, tag="abort_requests", kw_only=True):
    """Abort by exact id (a parent's id means its children too), or everything."""

    req_ids: tuple[str, ...] = ()
    abort_all: bool = False


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    pass


class Profile(msgspec.Struct, frozen=True, tag="profile", kw_only=True):
    action: Literal["start", "stop"]
    output_dir: str | None = None


class SetLogLevel(msgspec.Struct, frozen=True, tag="log_level", kw_only=True):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class PrepareGrammar(msgspec.Struct, frozen=True, tag="prepare_grammar"):
    """Compile a grammar on every rank while steps go on, so that the request that needs it holds up nobody's step."""

    grammar: GrammarSpec


class GetServerInfo(msgspec.Struct, frozen=True, tag="server_info"):
    """Configuration, versions, memory, queues and counters as one JSON object."""


class GetMetrics(msgspec.Struct, frozen=True, tag="metrics"):
    """The engine's metrics as Prometheus text, in ``result["text"]``."""


ControlCommand = (
    Pause
    | Resume
    | IsPaused
    | UpdateWeights
    | UpdateWeightsFromTensors
    | WeightsChecksum
    | Sleep
    | Wakeup
    | AbortRequests
    | FlushCache
    | Profile
    | SetLogLevel
    | PrepareGrammar
    | GetServerInfo
    | GetMetrics
)


class ControlRequest(msgspec.Struct, frozen=True, tag="control", kw_only=True):
    request_id: str
    client_index: int
    command: ControlCommand


class ControlResponse(msgspec.Struct, frozen=True, tag="control_response", array_like=True, kw_only=True):
    """``error`` None means success and ``result`` holds the command's own object."""

    request_id: str
    result: dict[str, Any] = {}
    error: EngineError | None = None


# Everything an API process receives on its one socket.
ToClient = OutputBatch | EngineStatus | ControlResponse
