"""POST /tokenize and /detokenize, with vLLM's bodies."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from fastengine.entrypoints.arrival import checked_body
from fastengine.entrypoints.openai.chat_job import checked_tools
from fastengine.entrypoints.openai.chat_prompt import chat_prompt
from fastengine.entrypoints.openai.generation import check_model, check_prompt_ids
from fastengine.entrypoints.openai.refused_fields import NEUTRAL, Refused
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest, ChatMessage, ReasoningEffort, TokenId
from fastengine.entrypoints.responses import JsonReply
from fastengine.frontend.errors import bad_request
from fastengine.frontend.front_end import FrontEnd
from fastengine.frontend.text_service import ModelText, PromptKind
from fastengine.text.tokenizer import TokenizerError

# A chat's prompt is always tokenized as the chat endpoint does it.
REFUSED: Refused = {"mm_processor_kwargs": ({},)}
OF_A_CHAT = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "enable_thinking",
    "reasoning_effort",
    "tools",
)


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``, tokenized as /v1/completions or /v1/chat/completions would."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Begin a prompt with the tokenizer's special tokens. Default true; a chat has those of its template.")
    ] = None
    return_token_strs: Annotated[bool | None, Meta(description="Return the tokens as the vocabulary spells them, too.")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[dict[str, Any]] | None = None


class TokenizeReply(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Leave special tokens out of the text. Default false.")] = None


class DetokenizeReply(msgspec.Struct, kw_only=True):
    prompt: str


class TokenizeRoutes:
    def __init__(self, front: FrontEnd):
        self._front = front

    async def tokenize(self, request: Request) -> JsonReply:
        front = self._front
        parsed = await checked_body(front, request, TokenizeBody, REFUSED)
        body = parsed.value
        check_model(body.model, front.served_names)
        text = await front.text.ready()
        token_ids = await self._token_ids(body, text)
        reply = TokenizeReply(count=len(token_ids), max_model_len=text.max_model_len, tokens=token_ids)
        if body.return_token_strs:
            reply.token_strs = [text.tokenizer.token_text(token_id) for token_id in token_ids]
        return JsonReply(reply, headers=parsed.warning_headers())

    async def _token_ids(self, body: TokenizeBody, text: ModelText) -> list[int]:
        if body.prompt is None and body.messages is None:
            raise bad_request("prompt", "send either prompt or messages")
        if body.prompt is not None:
            for name in OF_A_CHAT:
                if getattr(body, name) not in (None, *NEUTRAL.get(name, ())):
                    raise bad_request(name, "belongs to messages, and prompt was sent")
            kind: PromptKind = "plain" if body.add_special_tokens is False else "special"
            return (await self._front.text.encode(body.prompt, kind, param="prompt", must_fit=False)).token_ids
        if body.add_special_tokens:
            raise bad_request("add_special_tokens", "a chat has the special tokens that its template writes, and exactly one BOS")
        chat = ChatCompletionRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            enable_thinking=body.enable_thinking,
            reasoning_effort=body.reasoning_effort,
            tools=body.tools,
        )
        checked_tools(chat)
        _, prompt = await chat_prompt(self._front.text, text, chat, with_tools=True)
        return list(prompt.token_ids)

    async def detokenize(self, request: Request) -> JsonReply:
        front = self._front
        parsed = await checked_body(front, request, DetokenizeBody, {})
        body = parsed.value
        check_model(body.model, front.served_names)
        text = await front.text.ready()
        if body.tokens:
            check_prompt_ids("tokens", body.tokens, text.spec.vocab_size)
        try:
            prompt = text.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        except TokenizerError as error:
            raise bad_request("tokens", str(error)) from None
        return JsonReply(DetokenizeReply(prompt=prompt), headers=parsed.warning_headers())
