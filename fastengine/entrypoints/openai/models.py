"""GET /v1/models and /v1/models/{name}"""

from __future__ import annotations

from starlette.requests import Request

from fastengine.entrypoints.openai.generation import check_model
from fastengine.entrypoints.openai.response_types import ModelCard, ModelList
from fastengine.entrypoints.responses import JsonReply
from fastengine.frontend.front_end import FrontEnd


class ModelsEndpoint:
    """The one served model under each of its names."""

    def __init__(self, front: FrontEnd):
        self._front = front

    def _card(self, name: str) -> ModelCard:
        front = self._front
        text = front.text.model
        return ModelCard(
            id=name,
            created=int(front.started_s),
            root=front.config.model.model,
            max_model_len=text.max_model_len if text is not None else front.config.model.max_model_len,
            weight_version=front.engine.status.weight_version,
        )

    async def list(self, request: Request) -> JsonReply:
        return JsonReply(ModelList(data=[self._card(name) for name in self._front.served_names]))

    async def get(self, request: Request) -> JsonReply:
        return JsonReply(self._card(check_model(request.path_params["name"], self._front.served_names)))
