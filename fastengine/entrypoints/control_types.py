"""Bodies and replies of the control API. Unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fastengine.protocol.control import PauseMode

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Tags = str | list[str] | None
# It stands in replies, metrics and logs. The look-ahead is for Python, whose $ would let a line's end pass.
Version = Annotated[
    str,
    Meta(
        pattern=r"^[!-~]([ -~]{0,126}[!-~])?$(?!\n)",
        description="The new weight version: up to 128 printable ASCII characters, no space at either end. Default: one is made up.",
    ),
]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Nothing: an empty body or ``{}``."""


class PauseBody(Body):
    mode: Annotated[PauseMode, Meta(description="What becomes of running requests; see docs/control-api.md.")] = "abort"
    timeout_s: Annotated[Seconds, Meta(description="Past it the engine stays running and the reply is a 504.")] = 60.0


class UpdateWeightsBody(Body):
    model_path: Annotated[str | None, Meta(description="Where the new weights are; default: the served path.")] = None
    version: Version | None = None
    format: Literal["auto", "safetensors", "gguf"] = "auto"
    verify_checksum: Annotated[str | None, Meta(description="Refuse weights whose checksum differs.")] = None
    keep_kv: Annotated[bool, Meta(description="Requests kept by an in_place pause go on over KV of the old weights.")] = False
    timeout_s: Seconds = 600.0


class UpdateTensorsBody(Body):
    path: Annotated[str, Meta(description="A safetensors file in shared memory.", min_length=1)]
    version: Version | None = None
    keep_kv: bool = False
    timeout_s: Seconds = 600.0


class MemoryBody(Body):
    tags: Annotated[Tags, Meta(description="weight, kv_cache, or both (default): a list, or a comma-separated string.")] = None
    timeout_s: Seconds = 600.0


class AbortBody(Body):
    req_ids: Annotated[list[str] | None, Meta(description="Exact request ids; a parent's id means its n children too.")] = None
    abort_all: bool = False


class ProfileBody(Body):
    action: Literal["start", "stop"]
    output_dir: str | None = None


class LogLevelBody(Body):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class SglangPauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class SglangUpdateBody(Body):
    model_path: Annotated[str, Meta(min_length=1)]
    load_format: Literal["auto", "safetensors", "gguf"] | None = None
    abort_all_requests: Annotated[bool, Meta(description="Abort what runs instead of waiting for it.")] = False
    weight_version: Version | None = None
    flush_cache: Annotated[Literal[True], Meta(description="The cache of old weights is never used again.")] = True


class SglangAbortBody(Body):
    rid: str | None = None
    abort_all: bool = False


class SglangMemoryBody(Body):
    tags: list[str] | None = None


class SglangProfileBody(Body):
    output_dir: str | None = None


# Where errors of every kind have the shape below, a wrong key's and a wrong method's too.
PATHS = frozenset(
    {
        "/v1/pause",
        "/v1/resume",
        "/v1/is_paused",
        "/v1/update_weights",
        "/v1/update_weights_from_tensors",
        "/v1/weights_checksum",
        "/v1/sleep",
        "/v1/wakeup",
        "/v1/abort_requests",
        "/v1/flush_cache",
        "/v1/profile",
        "/v1/log_level",
        "/v1/server_info",
        "/server_info",
    }
)
SGLANG_PATHS = frozenset(
    {
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/abort_request",
        "/flush_cache",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/start_profile",
        "/stop_profile",
        "/get_server_info",
    }
)


class ControlError(msgspec.Struct, kw_only=True):
    code: int
    message: str
    param: str | None = None


class ControlReply(msgspec.Struct, kw_only=True):
    """``result`` is the command's own object, null on an error."""

    request_id: str
    status: Literal["success", "error"]
    result: dict[str, Any] | None = None
    error: ControlError | None = None


class SglangReply(ControlReply, kw_only=True):
    """The same with the fields SGLang's clients look at; ``internal_states`` is the server information's."""

    success: bool
    message: str
    internal_states: list[dict[str, Any]] | UnsetType = UNSET
