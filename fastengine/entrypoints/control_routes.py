"""The control API: FastDeploy's and SGLang's names for what the engine loop answers between two steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from fastengine.entrypoints import control_types as types
from fastengine.entrypoints import request_body
from fastengine.entrypoints.openai.generation import new_request_id
from fastengine.entrypoints.responses import JsonReply, error_reply
from fastengine.frontend.engine_client import EngineClient
from fastengine.frontend.errors import ApiError, bad_request
from fastengine.frontend.front_end import FrontEnd
from fastengine.protocol import control
from fastengine.protocol.control import ControlCommand, MemoryTag

# What an answer may take beyond the time the command itself allows.
ANSWER_MARGIN_S = 5.0
QUICK_TIMEOUT_S = 10.0
# What copying new weights, or memory to and from disk, may take once it has begun: it is not given up half way.
COMMIT_MARGIN_S = 3600.0
PROFILE_TIMEOUT_S = 60.0
TAG_NAMES: dict[str, MemoryTag] = {"weight": "weight", "weights": "weight", "kv_cache": "kv_cache"}

Result = dict[str, Any]
Run = Callable[[EngineClient, Any], Awaitable[Result]]


@dataclass(frozen=True)
class ControlRoute:
    """One path. ``run`` sends the command(s) for a checked body and returns the result."""

    path: str
    body: type[types.Body]
    run: Run
    summary: str
    get: bool = False  # also answers GET
    sglang: bool = False
    as_states: bool = False  # the result is repeated where SGLang has its schedulers' states

    @property
    def methods(self) -> list[str]:
        return ["GET", "POST"] if self.get else ["POST"]


class ControlEndpoint:
    """The handler of one control route."""

    def __init__(self, front: FrontEnd, route: ControlRoute):
        self._front = front
        self._route = route

    async def handle(self, request: Request) -> JsonReply:
        request_id = new_request_id("ctl", None)
        request.state.request_id = request_id
        try:
            raw = await request_body.read_body(request, self._front.max_body_bytes)
            body = request_body.convert(request_body.decode_object(raw, empty_is={}), self._route.body)
            result = await self._route.run(self._front.engine, body)
        except ApiError as error:
            return error_reply(error, self._route.path, request_id=request_id)
        if self._route.sglang:
            reply = types.SglangReply(request_id=request_id, status="success", result=result, success=True, message="success")
            if self._route.as_states:
                reply.internal_states = [result]
            return JsonReply(reply)
        return JsonReply(types.ControlReply(request_id=request_id, status="success", result=result))


async def ask(engine: EngineClient, command: ControlCommand, timeout_s: float = QUICK_TIMEOUT_S) -> Result:
    """The engine's result. Raises ApiError with the code of the engine's own error, or 504."""
    response = await engine.control(command, timeout_s=timeout_s)
    if response.error is not None:
        raise ApiError.from_engine(response.error)
    return response.result


def simple(command: ControlCommand) -> Run:
    async def run(engine: EngineClient, body: types.Body) -> Result:
        return await ask(engine, command)

    return run


async def pause(engine: EngineClient, body: types.PauseBody) -> Result:
    return await ask(engine, control.Pause(mode=body.mode, timeout_s=body.timeout_s), body.timeout_s + ANSWER_MARGIN_S)


async def sglang_pause(engine: EngineClient, body: types.SglangPauseBody) -> Result:
    return await pause(engine, types.PauseBody(mode=body.mode))


async def update_weights(engine: EngineClient, body: types.UpdateWeightsBody) -> Result:
    command = control.UpdateWeights(
        model_path=body.model_path,
        version=body.version,
        format=body.format,
        verify_checksum=body.verify_checksum,
        keep_kv=body.keep_kv,
        timeout_s=body.timeout_s,
    )
    return await ask(engine, command, body.timeout_s + COMMIT_MARGIN_S)


async def update_tensors(engine: EngineClient, body: types.UpdateTensorsBody) -> Result:
    command = control.UpdateWeightsFromTensors(path=body.path, version=body.version, keep_kv=body.keep_kv, timeout_s=body.timeout_s)
    return await ask(engine, command, body.timeout_s + COMMIT_MARGIN_S)


async def sglang_update(engine: EngineClient, body: types.SglangUpdateBody) -> Result:
    """Pause if need be, update, and go on as before, whether the update worked or not."""
    command = control.UpdateWeights(
        model_path=body.model_path,
        version=body.weight_version,
        format=body.load_format or "auto",
        stop_first="abort" if body.abort_all_requests else "drain",
    )
    return await ask(engine, command, command.timeout_s + COMMIT_MARGIN_S)


async def sleep(engine: EngineClient, body: types.MemoryBody) -> Result:
    return await ask(engine, control.Sleep(tags=memory_tags(body.tags), timeout_s=body.timeout_s), body.timeout_s + COMMIT_MARGIN_S)


async def wakeup(engine: EngineClient, body: types.MemoryBody) -> Result:
    return await ask(engine, control.Wakeup(tags=memory_tags(body.tags), timeout_s=body.timeout_s), body.timeout_s + COMMIT_MARGIN_S)


async def sglang_sleep(engine: EngineClient, body: types.SglangMemoryBody) -> Result:
    return await sleep(engine, types.MemoryBody(tags=body.tags))


async def sglang_wakeup(engine: EngineClient, body: types.SglangMemoryBody) -> Result:
    return await wakeup(engine, types.MemoryBody(tags=body.tags))


async def abort_requests(engine: EngineClient, body: types.AbortBody) -> Result:
    if body.abort_all == (body.req_ids is not None):
        raise bad_request("req_ids", "send either req_ids or abort_all: true")
    if body.req_ids is not None and not body.req_ids:
        raise bad_request("req_ids", "is empty")
    return await ask(engine, control.AbortRequests(req_ids=tuple(body.req_ids or ()), abort_all=body.abort_all))


async def sglang_abort(engine: EngineClient, body: types.SglangAbortBody) -> Result:
    if body.abort_all == bool(body.rid):
        raise bad_request("rid", "send either rid or abort_all: true")
    return await abort_requests(engine, types.AbortBody(req_ids=[body.rid] if body.rid else None, abort_all=body.abort_all))


async def profile(engine: EngineClient, body: types.ProfileBody) -> Result:
    if body.action == "stop" and body.output_dir is not None:
        raise bad_request("output_dir", "belongs to start: the trace goes where that said")
    return await ask(engine, control.Profile(action=body.action, output_dir=body.output_dir), PROFILE_TIMEOUT_S)


async def start_profile(engine: EngineClient, body: types.SglangProfileBody) -> Result:
    return await profile(engine, types.ProfileBody(action="start", output_dir=body.output_dir))


async def stop_profile(engine: EngineClient, body: types.Body) -> Result:
    return await profile(engine, types.ProfileBody(action="stop"))


async def log_level(engine: EngineClient, body: types.LogLevelBody) -> Result:
    return await ask(engine, control.SetLogLevel(level=body.level))


def memory_tags(tags: types.Tags) -> tuple[MemoryTag, ...]:
    """Checked tags without repetition; None means all of them. Raises ApiError 400."""
    if tags is None:
        return ("weight", "kv_cache")
    names = [name.strip() for name in tags.split(",")] if isinstance(tags, str) else tags
    unknown = [name for name in names if name not in TAG_NAMES]
    if unknown or not names:
        raise bad_request("tags", f"{unknown[0]!r} is not one of weight, kv_cache" if unknown else "is empty")
    return tuple(dict.fromkeys(TAG_NAMES[name] for name in names))


ROUTES = (
    ControlRoute("/v1/pause", types.PauseBody, pause, "Stop stepping; answers when it is true on every rank"),
    ControlRoute("/v1/resume", types.Body, simple(control.Resume()), "Go on after a pause"),
    ControlRoute("/v1/is_paused", types.Body, simple(control.IsPaused()), "Whether the engine is paused", get=True),
    ControlRoute("/v1/update_weights", types.UpdateWeightsBody, update_weights, "Replace the weights; 409 unless paused"),
    ControlRoute("/v1/update_weights_from_tensors", types.UpdateTensorsBody, update_tensors, "Replace named tensors from shared memory"),
    ControlRoute("/v1/weights_checksum", types.Body, simple(control.WeightsChecksum()), "A checksum of the weights that serve", get=True),
    ControlRoute("/v1/sleep", types.MemoryBody, sleep, "Pause and give memory back to the system"),
    ControlRoute("/v1/wakeup", types.MemoryBody, wakeup, "Take the memory back and resume"),
    ControlRoute("/v1/abort_requests", types.AbortBody, abort_requests, "End requests with what they have"),
    ControlRoute("/v1/flush_cache", types.Body, simple(control.FlushCache()), "Forget all cached prefixes", get=True),
    ControlRoute("/v1/profile", types.ProfileBody, profile, "Start or stop the workers' profiler"),
    ControlRoute("/v1/log_level", types.LogLevelBody, log_level, "Set the log level of all processes"),
    ControlRoute("/v1/server_info", types.Body, simple(control.GetServerInfo()), "What the engine knows of itself", get=True),
    ControlRoute("/pause_generation", types.SglangPauseBody, sglang_pause, "SGLang's name of /v1/pause", sglang=True),
    ControlRoute("/continue_generation", types.Body, simple(control.Resume()), "SGLang's name of /v1/resume", sglang=True),
    ControlRoute("/update_weights_from_disk", types.SglangUpdateBody, sglang_update, "Pause, update the weights, resume", sglang=True),
    ControlRoute("/abort_request", types.SglangAbortBody, sglang_abort, "SGLang's name of /v1/abort_requests", sglang=True),
    ControlRoute("/flush_cache", types.Body, simple(control.FlushCache()), "SGLang's name of /v1/flush_cache", get=True, sglang=True),
    ControlRoute("/release_memory_occupation", types.SglangMemoryBody, sglang_sleep, "SGLang's name of /v1/sleep", sglang=True),
    ControlRoute("/resume_memory_occupation", types.SglangMemoryBody, sglang_wakeup, "SGLang's name of /v1/wakeup", sglang=True),
    ControlRoute("/start_profile", types.SglangProfileBody, start_profile, "SGLang's name of /v1/profile start", sglang=True),
    ControlRoute("/stop_profile", types.Body, stop_profile, "SGLang's name of /v1/profile stop", sglang=True),
    ControlRoute("/server_info", types.Body, simple(control.GetServerInfo()), "The same as /v1/server_info", get=True),
    ControlRoute(
        "/get_server_info", types.Body, simple(control.GetServerInfo()), "SGLang's name of /v1/server_info", get=True, sglang=True, as_states=True
    ),
)
CONTROL_PATHS = frozenset(route.path for route in ROUTES)
