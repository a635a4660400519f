"""From a chat's messages to its prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastengine.entrypoints.openai.chat_messages import joined_text, template_message
from fastengine.entrypoints.openai.generation import Prompt, check_prompt_ids
from fastengine.entrypoints.openai.request_types import ChatCompletionRequest
from fastengine.frontend.errors import bad_request
from fastengine.frontend.text_service import ModelText, TextService
from fastengine.text.chat_template import ChatTemplate, ChatTemplateError

OWN_FIELDS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


async def chat_prompt(service: TextService, text: ModelText, body: ChatCompletionRequest, *, with_tools: bool) -> tuple[str, Prompt]:
    """(the field it came from, the prompt). ``with_tools``: the template is shown ``body.tools``. Raises ApiError."""
    if body.prompt_token_ids is not None:
        token_ids = [token for token in body.prompt_token_ids if isinstance(token, int)]
        if len(token_ids) < len(body.prompt_token_ids):
            raise bad_request("prompt_token_ids", "a chat has one prompt: send a flat list of token ids")
        check_prompt_ids("prompt_token_ids", token_ids, text.spec.vocab_size)
        return "prompt_token_ids", Prompt(token_ids)
    render = _renderer(service, text, body, body.tools if with_tools else None)
    param = "messages" if body.chat_template is None else "chat_template"
    try:
        # A template of the client's own may be slow: it must not hold up everybody's tokenization.
        source = await service.render(body.chat_template, render) if body.chat_template is not None else render
        encoded = await service.encode(source, "chat", param="messages")
    except ChatTemplateError as error:
        raise bad_request(error.field or param, str(error)) from None
    if not encoded.token_ids:
        raise bad_request(param, "the chat template makes nothing of these messages")
    return "messages", Prompt(encoded.token_ids, encoded.text)


def _renderer(service: TextService, text: ModelText, body: ChatCompletionRequest, tools: list[dict[str, Any]] | None) -> Callable[[], str]:
    if not body.messages:
        raise bad_request("messages", "at least one message is required" if body.messages is not None else "this field is required")
    messages = [template_message(message, i) for i, message in enumerate(body.messages)]
    continue_final = bool(body.continue_final_message)
    add_prompt = (not continue_final) if body.add_generation_prompt is None else body.add_generation_prompt
    if continue_final and add_prompt:
        raise bad_request("continue_final_message", "can't be true together with add_generation_prompt")
    if body.echo and not continue_final:
        raise bad_request("echo", "only allowed when continue_final_message is true")
    variables = template_variables(body)
    own = OWN_FIELDS & variables.keys()
    if own:
        raise bad_request("chat_template_kwargs", f"{min(own)} is not for the template alone: set the request's field")
    template = text.tool_template if tools and text.tool_template is not None else text.chat_template
    source = body.chat_template
    if template is None and source is None:
        raise bad_request("messages", "the model has no chat template: send chat_template, or use /v1/completions")

    def render() -> str:
        chosen = template
        if source is not None:
            chosen = ChatTemplate(source, text.tokenizer.special_tokens, isolated=True, children=service.template_children)
        assert chosen is not None
        return chosen.render(messages, tools=tools, add_generation_prompt=add_prompt, continue_final_message=continue_final, **variables)

    return render


def template_variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """The chat template's variables beside messages and tools."""
    named = {"enable_thinking": body.enable_thinking, "reasoning_effort": body.reasoning_effort}
    if body.enable_thinking is None and body.reasoning_effort == "none":
        named["enable_thinking"] = False
    return (body.chat_template_kwargs or {}) | {name: value for name, value in named.items() if value is not None}


def thinking_enabled(body: ChatCompletionRequest) -> bool | None:
    """What the request says about thinking, None if nothing."""
    value = template_variables(body).get("enable_thinking")
    return value if isinstance(value, bool) else None


def echoed(body: ChatCompletionRequest) -> str:
    """The final message's text, which ``echo`` repeats before the answer that continues it."""
    return joined_text(body.messages[-1], len(body.messages) - 1) if body.echo and body.messages else ""
