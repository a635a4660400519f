"""Routes about the server itself: health, metrics, version, configuration."""

from __future__ import annotations

import importlib.metadata
import platform
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fastengine.entrypoints.instance import paddle_package
from fastengine.entrypoints.responses import JsonReply, interrupted_by_disconnect
from fastengine.frontend.errors import ApiError, ClientDisconnected, engine_unavailable
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.request_manager import SequenceInput
from fastengine.protocol.control import GetMetrics, GetServerInfo, IsPaused
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.tokens import pack_token_ids
from fastengine.version import __version__

METRICS_TIMEOUT_S = 1.0
GENERATE_TIMEOUT_S = 30.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerRoutes:
    """Handlers, one method per route."""

    def __init__(self, front: FrontEnd):
        self._front = front

    async def health(self, request: Request) -> JsonReply:
        """200 when requests are answered or (paused) wait for an operator, 503 with the engine's state otherwise.

        While workers are started again requests are taken, and wait: send them elsewhere if there is an elsewhere.
        """
        status = self._front.engine.status
        state = status.state
        if state == "ready" and self._front.text.model is None:
            state = "starting"
        body = {
            "status": "ok" if state == "ready" else "unavailable",
            "state": state,
            "message": status.message,
            "progress": status.progress,
            "paused": status.paused,
            "sleeping": status.sleeping,
            "weight_version": status.weight_version,
        }
        healthy = state == "ready"
        return JsonReply(body, 200 if healthy else 503, None if healthy else {"Retry-After": "1"})

    async def health_generate(self, request: Request) -> Response:
        """Generates one token; 503 when that is not possible now."""
        front = self._front
        front.manager.check_accepting()
        # Asked, not remembered: another API process may have been told of a pause that is still on its way here.
        if (await front.engine.control(IsPaused(), timeout_s=METRICS_TIMEOUT_S)).result["is_paused"]:
            raise engine_unavailable("the engine is paused")
        text = await front.text.ready()
        prompt = [text.spec.bos_token_id or 0]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        sequence = SequenceInput(pack_token_ids(prompt), sampling)
        stream = front.manager.generate(f"health-{uuid.uuid4().hex}", [sequence], timeout_s=GENERATE_TIMEOUT_S)
        try:
            async with stream, interrupted_by_disconnect(request.receive, stream):
                while not stream.finished:
                    for update in await stream.updates():
                        if update.error is not None:
                            raise ApiError(503, update.error.message, retry_after_s=1.0)
                        if update.finish_reason == "abort":
                            raise engine_unavailable("the engine was paused")
        except ClientDisconnected:
            return Response(status_code=499)
        return JsonReply({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text: the engine's metrics, then those of all API processes."""
        try:
            reply = await self._front.engine.control(GetMetrics(), timeout_s=METRICS_TIMEOUT_S)
        except ApiError as error:
            text, up = f"# the engine's metrics are missing: {error.message}\n", 0
        else:
            text, up = str(reply.result.get("text", "")), 1
        own = f"# HELP fastengine:engine_up Whether the engine answered this scrape.\n# TYPE fastengine:engine_up gauge\nfastengine:engine_up {up}\n"
        return PlainTextResponse(text + own + self._front.http_metrics.render(), media_type=METRICS_TYPE)

    async def version(self, request: Request) -> JsonReply:
        """Versions of what runs here, and what the engine says of its operators (null while it doesn't answer)."""
        engine: dict[str, Any] | None
        try:
            reply = await self._front.engine.control(GetServerInfo(), timeout_s=METRICS_TIMEOUT_S)
            engine = {"version": reply.result.get("version"), **(reply.result.get("workers") or {})}
        except ApiError:
            engine = None
        return JsonReply({"version": __version__, "python": platform.python_version(), "paddle": paddle_version(), "engine": engine})

    async def config_info(self, request: Request) -> JsonReply:
        """Every setting and its value; secrets are hidden."""
        return JsonReply(self._front.config.flat())

    async def load(self, request: Request) -> JsonReply:
        """What the API processes have open, in all and each; ``server_load`` is vLLM's name of ``streams``."""
        workers = list(self._front.board.read())
        streams, sequences = sum(load.streams for load in workers), sum(load.sequences for load in workers)
        return JsonReply({"server_load": streams, "streams": streams, "sequences": sequences, "api_workers": workers})


def paddle_version() -> str | None:
    """The installed Paddle's version, read from its metadata: importing it takes a second and hundreds of megabytes."""
    package = paddle_package()
    return None if package is None else importlib.metadata.version(package)
