"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastengine.entrypoints.openai.chunks import ChunkWriter
from fastengine.entrypoints.openai.endpoint import GeneratingEndpoint, raise_error
from fastengine.entrypoints.openai.generation import Job, Prompt, check_length, check_num_sequences, check_prompt_ids, now_s
from fastengine.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from fastengine.entrypoints.openai.refused_fields import REFUSED_BY_CHAT
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest, ChatMessage
from fastengine.entrypoints.openai.response_types import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    TokenLogprob,
)
from fastengine.entrypoints.openai.sampling import sampling_params
from fastengine.entrypoints.responses import DONE_EVENT, EventWriter
from fastengine.frontend.errors import bad_request
from fastengine.frontend.text_service import ModelText
from fastengine.frontend.text_stream import TextStream, TextUpdate
from fastengine.protocol.outputs import TopLogprobs
from fastengine.text.chat_template import ChatTemplate, ChatTemplateError


class ChatEndpoint(GeneratingEndpoint[ChatCompletionRequest]):
    body_type = ChatCompletionRequest
    refused = REFUSED_BY_CHAT
    id_prefix = "chatcmpl"

    async def prepare(self, body: ChatCompletionRequest, request_id: str, model: str, text: ModelText) -> Job:
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if max_tokens == 0:
            raise bad_request("max_tokens", "expected int >= 1")
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs", "only allowed when logprobs is true")
        sampling = sampling_params(body, text, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
        n = body.n or 1
        check_num_sequences("n", 1, n)
        param, prompt = await self._prompt(body, text)
        check_length(param, len(prompt.token_ids), max_tokens, text.max_model_len)
        return Job(request_id=request_id, created=now_s(), model=model, fields=body, prompts=[prompt], sampling=sampling, n=n)

    async def _prompt(self, body: ChatCompletionRequest, text: ModelText) -> tuple[str, Prompt]:
        """(the field it came from, the prompt)"""
        if body.prompt_token_ids is not None:
            token_ids = [token for token in body.prompt_token_ids if isinstance(token, int)]
            if len(token_ids) < len(body.prompt_token_ids):
                raise bad_request("prompt_token_ids", "a chat has one prompt: send a flat list of token ids")
            check_prompt_ids("prompt_token_ids", token_ids, text.spec.vocab_size)
            return "prompt_token_ids", Prompt(token_ids)
        render = self._renderer(body, text)
        try:
            # A template of the client's own may be slow: it must not hold up everybody's tokenization.
            source = await self._front.text.render(render) if body.chat_template is not None else render
            encoded = await self._front.text.encode(source, "chat")
        except ChatTemplateError as error:
            raise bad_request("messages" if body.chat_template is None else "chat_template", str(error)) from None
        check_prompt_ids("messages", encoded.token_ids, text.spec.vocab_size)
        return "messages", Prompt(encoded.token_ids, encoded.text)

    def _renderer(self, body: ChatCompletionRequest, text: ModelText) -> Callable[[], str]:
        if not body.messages:
            raise bad_request("messages", "at least one message is required" if body.messages is not None else "this field is required")
        messages = [template_message(message, i) for i, message in enumerate(body.messages)]
        continue_final = bool(body.continue_final_message)
        add_prompt = (not continue_final) if body.add_generation_prompt is None else body.add_generation_prompt
        if continue_final and add_prompt:
            raise bad_request("continue_final_message", "can't be true together with add_generation_prompt")
        if body.echo and not continue_final:
            raise bad_request("echo", "only allowed when continue_final_message is true")
        named = {"enable_thinking": body.enable_thinking, "reasoning_effort": body.reasoning_effort}
        variables = (body.chat_template_kwargs or {}) | {name: value for name, value in named.items() if value is not None}
        own = {"messages", "tools", "add_generation_prompt", "continue_final_message"} & variables.keys()
        if own:
            raise bad_request("chat_template_kwargs", f"{min(own)} is not for the template alone: set the request's field")
        template, source = text.chat_template, body.chat_template
        if template is None and source is None:
            raise bad_request("messages", "the model has no chat template: send chat_template, or use /v1/completions")

        def render() -> str:
            chosen = template if source is None else ChatTemplate(source, text.tokenizer.special_tokens, isolated=True)
            assert chosen is not None
            return chosen.render(messages, add_generation_prompt=add_prompt, continue_final_message=continue_final, **variables)

        return render

    async def answer(self, job: Job, text: ModelText, stream: TextStream) -> ChatCompletion:
        answers = [_Answer() for _ in stream.sequences]
        while not stream.finished:
            updates = await stream.updates()
            raise_error(updates)
            for update in updates:
                answers[update.index].add(update, text)
        completion = ChatCompletion(
            id=job.request_id,
            created=job.created,
            model=job.model,
            choices=[answer.choice(i, job) for i, answer in enumerate(answers)],
            usage=job.usage(stream.sequences),
        )
        if answers[0].prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_logprobs(job.prompts[0].token_ids, answers[0].prompt_logprobs, text.tokenizer)
        return completion

    async def stream(self, job: Job, text: ModelText, stream: TextStream, writer: EventWriter) -> None:
        body = _fields(job)
        options = body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        chunks = ChunkWriter(
            {"id": job.request_id, "object": "chat.completion.chunk", "created": job.created, "model": job.model},
            before_text=b'"delta":{"content":',
            after_text=b"}",
            usage_field=include_usage,
        )
        begun: set[int] = set()
        while not stream.finished:
            updates = await stream.updates()
            raise_error(updates)
            events = []
            for update in updates:
                if update.index not in begun:
                    begun.add(update.index)
                    events.append(self._first_chunk(chunks, update, job, text))
                plain = not (update.logprobs or body.return_token_ids or update.finish_reason or continuous)
                if plain:
                    if update.text:
                        events.append(chunks.plain(update.index, update.text))
                    continue
                logprobs = {"content": chat_logprobs(update.token_ids, update.logprobs, text.tokenizer)} if update.logprobs else None
                events.append(
                    chunks.full(
                        update.index,
                        update.text,
                        logprobs=logprobs,
                        finish_reason=update.finish_reason,
                        stop_reason=update.stop_reason,
                        in_text_object={"completion_token_ids": update.token_ids} if body.return_token_ids else None,
                        usage=job.usage(stream.sequences) if continuous else None,
                    )
                )
            if stream.finished:
                if include_usage:
                    events.append(chunks.usage(job.usage(stream.sequences)))
                events.append(DONE_EVENT)
            if events:
                await writer.write(b"".join(events))

    def _first_chunk(self, chunks: ChunkWriter, update: TextUpdate, job: Job, text: ModelText) -> bytes:
        body = _fields(job)
        delta: dict[str, Any] = {"role": "assistant", "content": echoed(body)}
        if body.return_token_ids:
            delta["prompt_token_ids"] = job.prompts[0].token_ids
        if update.prompt_logprobs is not None:
            delta["prompt_logprobs"] = prompt_logprobs(job.prompts[0].token_ids, update.prompt_logprobs, text.tokenizer)
        return chunks.delta(update.index, delta)


@dataclass
class _Answer:
    """One choice while it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TopLogprobs | None] | None = None
    last: TextUpdate | None = None

    def add(self, update: TextUpdate, text: ModelText) -> None:
        self.text.append(update.text)
        self.token_ids += update.token_ids
        if update.logprobs:
            self.logprobs += chat_logprobs(update.token_ids, update.logprobs, text.tokenizer)
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.last = update

    def choice(self, index: int, job: Job) -> ChatChoice:
        body = _fields(job)
        message = AssistantMessage(content=echoed(body) + "".join(self.text))
        if body.return_token_ids:
            message.prompt_token_ids = list(job.prompts[0].token_ids)
            message.completion_token_ids = self.token_ids
        return ChatChoice(
            index=index,
            message=message,
            logprobs=ChatLogprobs(content=self.logprobs) if body.logprobs else None,
            finish_reason=self.last.finish_reason if self.last else None,
            stop_reason=self.last.stop_reason if self.last else None,
        )


def _fields(job: Job) -> ChatCompletionRequest:
    assert isinstance(job.fields, ChatCompletionRequest)
    return job.fields


def echoed(body: ChatCompletionRequest) -> str:
    """The final message's text, which ``echo`` repeats before the answer that continues it."""
    return joined_text(body.messages[-1], len(body.messages) - 1) if body.echo and body.messages else ""


def joined_text(message: ChatMessage, position: int) -> str:
    """The message's text parts as one string. Raises ApiError 400 for a part of another kind."""
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        param = f"messages[{position}].content[{i}]"
        if part.type not in ("text", "input_text", "output_text"):
            raise bad_request(f"{param}.type", f"{part.type!r} content is not supported by this model, only text is", code="unsupported_content")
        if part.text is None:
            raise bad_request(f"{param}.text", "this field is required")
        texts.append(part.text)
    return "".join(texts)


def template_message(message: ChatMessage, position: int) -> dict[str, Any]:
    """The message as chat templates know it."""
    if message.content is None and message.role != "assistant":
        raise bad_request(f"messages[{position}].content", "this field is required")
    content = None if message.content is None else joined_text(message, position)
    out: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "reasoning_content", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            out[name] = value
    return out
