"""The opening of every route that takes a body: read, checked, named, before anything of the model is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import Request

from fastengine.entrypoints import request_body
from fastengine.entrypoints.openai.generation import check_model, new_request_id
from fastengine.entrypoints.openai.refused_fields import Refused, refuse_unsupported
from fastengine.entrypoints.openai.request_types import CommonFields
from fastengine.frontend.front_end import FrontEnd

C = TypeVar("C", bound=CommonFields)


@dataclass(frozen=True)
class Arrival(Generic[C]):
    """A request that runs the model. ``model`` is what its reply calls the model, ``headers`` are the reply's."""

    body: C
    request_id: str
    model: str
    headers: dict[str, str]


async def checked_body(front: FrontEnd, request: Request, kind: type[request_body.T], refused: Refused) -> request_body.Parsed[request_body.T]:
    """The body as ``kind``. Raises ApiError: 400 for a field that has a bad value or is ``refused``, 408, 413."""
    raw = request_body.decode_object(await request_body.read_body(request, front.max_body_bytes))
    refuse_unsupported(raw, refused)
    return request_body.parse(raw, kind, known_elsewhere=refused, strict=front.config.server.strict_fields)


async def arrived(
    front: FrontEnd,
    request: Request,
    kind: type[C],
    refused: Refused,
    prefix: str,
    *,
    given_id: Callable[[C], str | None] = lambda body: body.request_id,
) -> Arrival[C]:
    """``request``, if it can be taken now. ``prefix`` begins the id of one whose caller has ``given`` it none. Raises ApiError."""
    front.manager.check_accepting()
    parsed = await checked_body(front, request, kind, refused)
    body = parsed.value
    request_id = new_request_id(prefix, given_id(body))
    request.state.request_id = request_id
    model = check_model(body.model, front.served_names)
    return Arrival(body, request_id, model, {"X-Request-Id": request_id, **parsed.warning_headers()})
