"""The ASGI application of an API process: every route, error handler and schema in one place."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route, request_response

from fastengine.entrypoints import control_routes, control_types, tokenize_routes
from fastengine.entrypoints.anthropic import message_types
from fastengine.entrypoints.anthropic.messages import MessagesEndpoint
from fastengine.entrypoints.http_gate import HttpGate
from fastengine.entrypoints.openai import embeddings_types, request_types, response_types, responses_types
from fastengine.entrypoints.openai.chat import ChatEndpoint
from fastengine.entrypoints.openai.completions import CompletionEndpoint
from fastengine.entrypoints.openai.embeddings import EmbeddingsEndpoint
from fastengine.entrypoints.openai.generation import new_request_id
from fastengine.entrypoints.openai.models import ModelsEndpoint
from fastengine.entrypoints.openai.responses_endpoint import MAX_LISTED, ResponsesEndpoint
from fastengine.entrypoints.responses import error_reply
from fastengine.entrypoints.score_routes import ScoreRoutes
from fastengine.entrypoints.score_types import RerankBody, RerankReply, ScoreBody, ScoreReply
from fastengine.entrypoints.server_routes import ServerRoutes
from fastengine.entrypoints.sglang.generate import GenerateEndpoint
from fastengine.entrypoints.sglang.generate_types import GenerateBody, GenerateReply
from fastengine.entrypoints.tokenize_routes import TokenizeRoutes
from fastengine.frontend.errors import ApiError, ClientDisconnected
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.request_traces import TraceHeaders
from fastengine.version import __version__

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]
Json = dict[str, Any]
# Of a path that isn't there, in the message that says so.
MAX_PATH_TOLD = 200
_PATH_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
ITEMS_QUERY: list[Json] = [
    {"name": "limit", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 20}},
    {"name": "order", "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "schema": {"type": "string"}},
]


class HandlerRoute(APIRoute):
    """A route whose endpoint takes the request and returns the response: there are no parameters or dependencies to find out or to close."""

    def __init__(self, path: str, endpoint: Handler, **settings: Any):
        super().__init__(path, endpoint, **settings)
        self.app = request_response(endpoint)


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
            origins=server.cors_origins,
        )
    ]
    if server.cors_origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(server.cors_origins), allow_methods=["*"], allow_headers=["*"]))
    if front.traces is not None:
        middleware.insert(0, Middleware(TraceHeaders))
    app = FastAPI(title="fastengine", version=__version__, middleware=middleware, redirect_slashes=False)
    app.router.route_class = HandlerRoute
    schemas = Schemas()
    _add_openai_routes(app, front, schemas)
    _add_other_api_routes(app, front, schemas)
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
    schemas.post(
        app,
        "/v1/embeddings",
        EmbeddingsEndpoint(front).handle,
        embeddings_types.EmbeddingsBody,
        embeddings_types.EmbeddingsReply,
        tag,
        "Pooled hidden states",
    )
    _add_responses_routes(app, front, schemas)
    schemas.get(app, "/v1/models", models.list, response_types.ModelList, tag, "The served model under each of its names")
    schemas.get(app, "/v1/models/{name:path}", models.get, response_types.ModelCard, tag, "One of them")


def _add_responses_routes(app: FastAPI, front: FrontEnd, schemas: Schemas) -> None:
    responses, types, tag = ResponsesEndpoint(front), responses_types, "Responses"
    one = "/v1/responses/{response_id}"
    schemas.post(app, "/v1/responses", responses.create, types.ResponsesBody, types.ResponseObject, tag, "Create", stream=True)
    schemas.get(app, one, responses.get, types.ResponseObject, tag, "A stored response")
    schemas.add(app, "DELETE", one, responses.delete, types.DeletedResponse, tag, "Forget a stored response")
    schemas.add(app, "POST", one + "/cancel", responses.cancel, types.ResponseObject, tag, "Stop a response in the background")
    schemas.get(app, one + "/input_items", responses.input_items, types.InputItemList, tag, "What a stored response answered", query=ITEMS_QUERY)


def _add_other_api_routes(app: FastAPI, front: FrontEnd, schemas: Schemas) -> None:
    tokens, generate, messages = TokenizeRoutes(front), GenerateEndpoint(front), MessagesEndpoint(front)
    scores = ScoreRoutes(front)
    for root in ("", "/v1"):
        schemas.post(app, root + "/score", scores.score, ScoreBody, ScoreReply, "Scores", "Likelihood of texts after other texts")
        schemas.post(app, root + "/rerank", scores.rerank, RerankBody, RerankReply, "Scores", "Documents in order of the query's likelihood")
    types, tag = message_types, "Anthropic"
    schemas.post(
        app, "/v1/messages", messages.create, types.MessagesBody, types.MessageReply, tag, "Message", stream=True, error=types.AnthropicError
    )
    schemas.post(
        app,
        "/v1/messages/count_tokens",
        messages.count_tokens,
        types.CountTokensBody,
        types.CountTokensReply,
        tag,
        "The prompt's length in tokens",
        error=types.AnthropicError,
    )
    schemas.post(
        app, "/tokenize", tokens.tokenize, tokenize_routes.TokenizeBody, tokenize_routes.TokenizeReply, "Text", "Token ids of a prompt or a chat"
    )
    schemas.post(
        app, "/detokenize", tokens.detokenize, tokenize_routes.DetokenizeBody, tokenize_routes.DetokenizeReply, "Text", "The text of token ids"
    )
    schemas.post(app, "/generate", generate.handle, GenerateBody, GenerateReply, "SGLang", "Generate from text or token ids", stream=True, many=True)


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
            kind = PlainTextResponse if path == "/metrics" else JSONResponse
            app.add_api_route(path, handler, methods=[method], tags=["Server"], operation_id=operation, response_model=None, response_class=kind)


def _add_control_routes(app: FastAPI, front: FrontEnd, schemas: Schemas) -> None:
    for route in control_routes.ROUTES:
        endpoint = control_routes.ControlEndpoint(front, route)
        reply = control_types.SglangReply if route.sglang else control_types.ControlReply
        required = any(f.required for f in msgspec.structs.fields(route.body))
        schemas.post(app, route.path, endpoint.handle, route.body, reply, "Control", route.summary, body_required=required, error=reply)
        if route.get:
            schemas.add(app, "GET", route.path, endpoint.handle, reply, "Control", route.summary, error=reply)


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
        many: bool = False,
        body_required: bool = True,
        error: type = response_types.ErrorBody,
    ) -> None:
        """``many``: the reply may also be a list of ``reply``."""
        content = {"application/json": {"schema": self._ref(body)}}
        extra = {"requestBody": {"required": body_required, "content": content}}
        responses = self._responses(reply, error, stream=stream, many=many)
        app.add_api_route(path, handler, methods=["POST"], tags=[tag], summary=summary, openapi_extra=extra, responses=responses, response_model=None)

    def get(self, app: FastAPI, path: str, handler: Handler, reply: type, tag: str, summary: str, *, query: Sequence[Json] = ()) -> None:
        self.add(app, "GET", path, handler, reply, tag, summary, query=query)

    def add(
        self,
        app: FastAPI,
        method: str,
        path: str,
        handler: Handler,
        reply: type,
        tag: str,
        summary: str,
        *,
        query: Sequence[Json] = (),
        error: type = response_types.ErrorBody,
    ) -> None:
        """A route without a body; ``query`` are its parameters as OpenAPI describes them."""
        in_path = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _PATH_PARAMETER.findall(path)]
        extra = {"parameters": [*in_path, *({"in": "query", "required": False, **parameter} for parameter in query)]}
        responses = self._responses(reply, error)
        app.add_api_route(path, handler, methods=[method], tags=[tag], summary=summary, openapi_extra=extra, responses=responses, response_model=None)

    def _ref(self, kind: type) -> dict[str, str]:
        self._types[kind] = None
        return {"$ref": f"#/components/schemas/{kind.__name__}"}

    def _responses(self, reply: type, error: type, *, stream: bool = False, many: bool = False) -> dict[int | str, dict[str, Any]]:
        schema: dict[str, Any] = self._ref(reply)
        if many:
            schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        if stream:
            content["text/event-stream"] = {}  # what an event holds is each API's own affair
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


def _meant(app: FastAPI, path: str) -> str:
    """What a caller who wrote one slash too many, or left out the version, is told."""
    clean = re.sub("//+", "/", path).rstrip("/")
    known = {route.path for route in app.routes if isinstance(route, Route)}
    found = next((candidate for candidate in (clean, "/v1" + clean, clean.removeprefix("/v1")) if candidate in known), None)
    return "" if found is None else f": it is {found}"


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        request_id = request.scope.get("state", {}).get("request_id")
        return error_reply(error, request.scope["path"], headers={"X-Request-Id": request_id} if request_id else None)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"][:MAX_PATH_TOLD]
        messages = {404: f"there is no {path} here{_meant(app, request.scope['path'])}", 405: f"{request.scope['method']} is not allowed on {path}"}
        headers = dict(error.headers or {})
        if error.status_code == 405:  # one path may stand in several routes, of which the router names one
            found = [route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
            allowed = {method for route in found for method in route.methods or ()}
            headers["Allow"] = ", ".join(sorted(allowed | {"HEAD"} if "GET" in allowed and path not in control_routes.CONTROL_PATHS else allowed))
        return error_reply(ApiError(error.status_code, messages.get(error.status_code, str(error.detail))), path, headers=headers)

    async def unforeseen(request: Request, error: Exception) -> Response:
        request_id = request.scope.get("state", {}).get("request_id") or new_request_id("req", None)
        logger.error("%s: %s %s failed", request_id, request.method, request.scope["path"], exc_info=error)
        # The server is told of the exception, too, and closes the connection behind the reply: the client should know.
        headers = {"X-Request-Id": request_id, "Connection": "close"}
        return error_reply(ApiError(500, f"internal error in request {request_id}"), request.scope["path"], headers=headers)

    async def client_gone(request: Request, error: Exception) -> Response:
        logger.debug("%s: the client went away", request.scope["path"])
        return Response(status_code=499)  # for the count: nobody reads it

    for gone in (ClientDisconnected, ClientDisconnect):
        app.add_exception_handler(gone, client_gone)
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unforeseen)
