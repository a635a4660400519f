"""The ASGI application of an API process: every route, error handler and schema in one place."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from fastengine.entrypoints import control_routes, control_types
from fastengine.entrypoints.http_gate import HttpGate
from fastengine.entrypoints.openai import request_types, response_types
from fastengine.entrypoints.openai.chat import ChatEndpoint
from fastengine.entrypoints.openai.completions import CompletionEndpoint
from fastengine.entrypoints.openai.generation import new_request_id
from fastengine.entrypoints.openai.models import ModelsEndpoint
from fastengine.entrypoints.responses import error_reply
from fastengine.entrypoints.server_routes import ServerRoutes
from fastengine.frontend.errors import ApiError
from fastengine.frontend.front_end import FrontEnd
from fastengine.version import __version__

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]


def create_app(front: FrontEnd) -> FastAPI:
    """The application over ``front``, which the caller starts and closes."""
    server = front.config.server
    with_control = server.control_api
    middleware = [
        Middleware(
            HttpGate,
            keys=server.api_key,
            control_keys=server.control_api_key or server.api_key,
            control_paths=control_routes.CONTROL_PATHS if with_control else frozenset(),
            metrics=front.http_metrics,
        )
    ]
    if server.cors_origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(server.cors_origins), allow_methods=["*"], allow_headers=["*"]))
    app = FastAPI(title="fastengine", version=__version__, middleware=middleware, redirect_slashes=False)
    schemas = Schemas()
    _add_openai_routes(app, front, schemas)
    _add_server_routes(app, front)
    if with_control:
        _add_control_routes(app, front, schemas)
    _add_error_handlers(app)
    schemas.install(app)
    front.http_metrics.open(sorted({route.path for route in app.routes}))  # type: ignore[attr-defined]
    return app


def _add_openai_routes(app: FastAPI, front: FrontEnd, schemas: Schemas) -> None:
    chat, completions, models = ChatEndpoint(front), CompletionEndpoint(front), ModelsEndpoint(front)
    tag = "OpenAI"
    schemas.post(
        app, "/v1/chat/completions", chat.handle, request_types.ChatCompletionRequest, response_types.ChatCompletion, tag, "Chat", stream=True
    )
    schemas.post(
        app, "/v1/completions", completions.handle, request_types.CompletionRequest, response_types.Completion, tag, "Completion", stream=True
    )
    schemas.get(app, "/v1/models", models.list, response_types.ModelList, tag, "The served model under each of its names")
    schemas.get(app, "/v1/models/{name:path}", models.get, response_types.ModelCard, tag, "One of them")


def _add_server_routes(app: FastAPI, front: FrontEnd) -> None:
    routes = ServerRoutes(front)
    table: list[tuple[str, Handler, list[str]]] = [
        ("/health", routes.health, ["GET", "HEAD"]),
        ("/ping", routes.health, ["GET", "HEAD", "POST"]),
        ("/health_generate", routes.health_generate, ["GET"]),
        ("/metrics", routes.metrics, ["GET"]),
        ("/version", routes.version, ["GET"]),
        ("/config-info", routes.config_info, ["GET"]),
        ("/load", routes.load, ["GET"]),
    ]
    for path, handler, methods in table:
        for method in methods:
            operation = f"{path.strip('/')}_{method.lower()}"
            app.add_api_route(path, handler, methods=[method], tags=["Server"], operation_id=operation, response_model=None)


def _add_control_routes(app: FastAPI, front: FrontEnd, schemas: Schemas) -> None:
    for route in control_routes.ROUTES:
        endpoint = control_routes.ControlEndpoint(front, route)
        reply = control_types.SglangReply if route.sglang else control_types.ControlReply
        schemas.post(app, route.path, endpoint.handle, route.body, reply, "Control", route.summary, body_required=False, error=reply)
        if route.get:
            schemas.get(app, route.path, endpoint.handle, reply, "Control", route.summary)


class Schemas:
    """Adds routes whose bodies and replies are msgspec structs, and their schemas to ``/openapi.json``."""

    def __init__(self) -> None:
        self._types: dict[type, None] = {response_types.ErrorBody: None}

    def post(
        self,
        app: FastAPI,
        path: str,
        handler: Handler,
        body: type,
        reply: type,
        tag: str,
        summary: str,
        *,
        stream: bool = False,
        body_required: bool = True,
        error: type = response_types.ErrorBody,
    ) -> None:
        content = {"application/json": {"schema": self._ref(body)}}
        extra = {"requestBody": {"required": body_required, "content": content}}
        responses = self._responses(reply, error, stream=stream)
        app.add_api_route(path, handler, methods=["POST"], tags=[tag], summary=summary, openapi_extra=extra, responses=responses, response_model=None)

    def get(self, app: FastAPI, path: str, handler: Handler, reply: type, tag: str, summary: str) -> None:
        responses = self._responses(reply, response_types.ErrorBody, stream=False)
        app.add_api_route(path, handler, methods=["GET"], tags=[tag], summary=summary, responses=responses, response_model=None)

    def _ref(self, kind: type) -> dict[str, str]:
        self._types[kind] = None
        return {"$ref": f"#/components/schemas/{kind.__name__}"}

    def _responses(self, reply: type, error: type, *, stream: bool) -> dict[int | str, dict[str, Any]]:
        content: dict[str, Any] = {"application/json": {"schema": self._ref(reply)}}
        if stream:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        failure = {"description": "Refused or failed", "content": {"application/json": {"schema": self._ref(error)}}}
        return {200: {"description": "Success", "content": content}, "4XX": failure, "5XX": failure}

    def install(self, app: FastAPI) -> None:
        """Make ``app.openapi`` build the document once, with the structs' schemas among its components."""

        def openapi() -> dict[str, Any]:
            if app.openapi_schema is None:
                document = get_openapi(title=app.title, version=app.version, routes=app.routes)
                _, components = msgspec.json.schema_components(list(self._types), ref_template="#/components/schemas/{name}")
                document.setdefault("components", {}).setdefault("schemas", {}).update(components)
                app.openapi_schema = document
            return app.openapi_schema

        app.openapi = openapi  # type: ignore[method-assign]


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_reply(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not allowed on {request.url.path}"}
        return error_reply(ApiError(error.status_code, messages.get(error.status_code, str(error.detail))), headers=error.headers)

    async def unforeseen(request: Request, error: Exception) -> Response:
        request_id = request.scope.get("state", {}).get("request_id") or new_request_id("req", None)
        logger.error("%s: %s %s failed", request_id, request.method, request.url.path, exc_info=error)
        return error_reply(ApiError(500, f"internal error in request {request_id}"), headers={"X-Request-Id": request_id})

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unforeseen)
