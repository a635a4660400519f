"""POST /v1/embeddings: pooled hidden states of the served decoder model."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from fastengine.entrypoints.arrival import arrived
from fastengine.entrypoints.openai.embeddings_types import MAX_INPUTS, Embedding, EmbeddingsBody, EmbeddingsReply, EmbeddingUsage
from fastengine.entrypoints.openai.generation import check_length, check_prompt_ids, generate, item_names
from fastengine.entrypoints.openai.refused_fields import Refused, refused_by
from fastengine.entrypoints.responses import JsonReply, interrupted_by_disconnect
from fastengine.frontend.errors import ApiError, bad_request
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.request_manager import SequenceInput
from fastengine.frontend.text_service import ModelText, PromptKind
from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.tokens import pack_token_ids

Vector = npt.NDArray[np.float32]
# Field -> the values that ask for nothing, next to null.
REFUSED: Refused = refused_by(EmbeddingsBody, {"truncate_prompt_tokens": (-1,)})


class EmbeddingsEndpoint:
    def __init__(self, front: FrontEnd):
        self._front = front

    async def handle(self, request: Request) -> Response:
        new = await arrived(self._front, request, EmbeddingsBody, REFUSED, "embd")
        body = new.body
        text = await self._front.text.ready()
        if not text.has_logits:
            raise bad_request("input", "the null model has no hidden states")
        hidden_size = text.spec.hidden_size
        if body.dimensions is not None and body.dimensions > hidden_size:
            raise bad_request("dimensions", f"{body.dimensions} is more than the model's {hidden_size}")
        prompts = await self._prompts(body, text)
        vectors = await self._vectors(request, body, new.request_id, prompts)
        num_tokens = sum(map(len, prompts))
        data = [Embedding(index=i, embedding=_encoded(shaped(vector, body), body)) for i, vector in enumerate(vectors)]
        reply = EmbeddingsReply(data=data, model=new.model, usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens))
        return JsonReply(reply, headers=new.headers)

    async def _prompts(self, body: EmbeddingsBody, text: ModelText) -> list[list[int]]:
        is_one = isinstance(body.input, str) or all(isinstance(item, int) for item in body.input)
        given: list[Any] = [body.input] if is_one else list(body.input)
        if len(given) > MAX_INPUTS:
            raise bad_request("input", f"has {len(given)} entries; {MAX_INPUTS} are allowed")
        names = ["input"] if is_one else item_names("input", given)
        if all(isinstance(item, str) for item in given):
            kind: PromptKind = "plain" if body.add_special_tokens is False else "special"
            encoded = await asyncio.gather(*(self._front.text.encode(item, kind, param=names[i]) for i, item in enumerate(given)))
            prompts = [row.token_ids for row in encoded]
        elif all(isinstance(item, list) for item in given):
            prompts = given
        else:
            raise bad_request("input", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
        for i, token_ids in enumerate(prompts):
            check_prompt_ids(names[i], token_ids, text.spec.vocab_size)
            check_length(names[i], len(token_ids), 0, text.max_model_len)
        return prompts

    async def _vectors(self, request: Request, body: EmbeddingsBody, request_id: str, prompts: list[list[int]]) -> list[Vector]:
        # The one token that ends the sequence is nothing to anybody.
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=body.pooling or "mean")
        sequences = [SequenceInput(pack_token_ids(token_ids), sampling) for token_ids in prompts]
        stream = generate(self._front.manager, request_id, sequences, body)
        vectors: dict[int, Vector] = {}
        async with stream, interrupted_by_disconnect(request.receive, stream):
            while not stream.finished:
                for update in await stream.updates():
                    if update.error is not None:
                        raise ApiError.from_engine(update.error)
                    if update.finish_reason == "abort":
                        raise ApiError(503, "the request was aborted", retry_after_s=1.0)
                    if update.embedding is None:
                        raise ApiError(500, "the served model gave no hidden states")
                    vectors[update.index] = np.frombuffer(update.embedding, dtype="<f4")
        return [vectors[i] for i in range(len(prompts))]


def shaped(vector: Vector, body: EmbeddingsBody) -> Vector:
    """Cut to ``dimensions``, then scaled to length 1 unless that was refused."""
    vector = vector[: body.dimensions]
    if body.normalize is False:
        return vector
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length > 0 else vector


def _encoded(vector: Vector, body: EmbeddingsBody) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    values: list[float] = vector.tolist()
    return values
