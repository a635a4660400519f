"""Messages to the text of a prompt, by the model's Jinja template or another one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from fastengine.config import ModelConfig
from fastengine.text.hf_tokenizer import read_template
from fastengine.text.template_children import TemplateChildren
from fastengine.text.template_sandbox import MAX_OUTPUT_CHARACTERS, TemplateFailure, compile_template, render_template
from fastengine.text.tokenizer import Tokenizer

MAX_REQUEST_TEMPLATE_CHARACTERS = 256 << 10
REQUEST_OUTPUT_CHARACTERS = 8 << 20
# Appended to the last message to find where it ends in the prompt. Templates may trim around it.
END_MARK = "\x02end of the last message\x03"
PROBE = "probe7f3a"

Message = Mapping[str, Any]
RolePlace = Literal["shown", "lost", "refused"]


BASIC_ROLES = frozenset({"system", "user", "assistant", "tool"})
OPENAI_ROLES = BASIC_ROLES | {"developer", "function"}
MAX_KNOWN_ROLES = 64


class ChatTemplateError(ValueError):
    """The messages can't be made into a prompt: the template is unusable, or refuses them. ``field`` is that of a chat's request, if it is one."""

    def __init__(self, message: str, *, field: str | None = None):
        super().__init__(message)
        self.field = field


class ChatTemplateOverLimit(ChatTemplateError):
    """A request's template took more time or memory than it may."""


class ChatTemplate:
    """A compiled template; content parts are joined to a string unless the template takes lists (found by trying).

    ``isolated``: it comes with a request, gets strings only, and is rendered in a child process with hard limits.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, isolated: bool = False, children: TemplateChildren | None = None):
        """Raises ChatTemplateError on a syntax error (``isolated``: when rendered). ``children`` start the processes of isolated ones."""
        if isolated and len(source) > MAX_REQUEST_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(f"the chat template is {len(source)} characters long; {MAX_REQUEST_TEMPLATE_CHARACTERS} are allowed")
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._isolated = isolated
        self._children = children or TemplateChildren()
        self._template = None if isolated else _guarded(compile_template, source)
        # Whether content may stay a list of parts, and whether it may be a plain string.
        self._takes_parts = not isolated and self._shows([{"type": "text", "text": PROBE}])
        self._takes_strings = isolated or not self._takes_parts or self._shows(PROBE)
        # What becomes of messages of roles that not every template knows.
        self._places: dict[str, RolePlace] = {}

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text; special tokens the template writes are in it as text.

        With ``continue_final_message`` it ends where the last message does, for the model to go on.
        ``kwargs`` are further variables of the template. Raises ChatTemplateError.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("add_generation_prompt and continue_final_message can't both be set")
        shaped = [self._shaped(index, message) for index, message in enumerate(messages)]
        if continue_final_message:
            if not shaped:
                raise ChatTemplateError("it needs a message to continue", field="continue_final_message")
            shaped[-1] = _marked(shaped[-1])
        variables = {**kwargs, **self._special_tokens, "messages": shaped, "tools": _tools(tools), "documents": documents}
        variables["add_generation_prompt"] = add_generation_prompt
        text = self._rendered(variables)
        if not continue_final_message:
            return text
        end = text.rfind(END_MARK)
        if end < 0:
            message = "the chat template does not show the last message's content as it is"
            raise ChatTemplateError(message, field="continue_final_message")
        return text[:end]

    def _rendered(self, variables: dict[str, Any]) -> str:
        if self._template is not None:
            return _guarded(render_template, self._template, variables)
        return _render_in_child(self._children, self.source, variables)

    def _shaped(self, index: int, message: Message) -> dict[str, Any]:
        """A copy of the message with its content and tool calls as templates expect them."""
        shaped = dict(message)
        role = message.get("role")
        if isinstance(role, str) and role not in BASIC_ROLES and not self._isolated:
            shaped["role"] = self._known_role(role, f"messages[{index}].role")
        content = message.get("content")
        if isinstance(content, list):
            if not self._takes_parts:
                shaped["content"] = _joined_text(index, content)
        elif isinstance(content, str):
            if not self._takes_strings:
                shaped["content"] = [{"type": "text", "text": content}]
        elif content is None:
            # Templates tell a pure tool call by its content being none.
            shaped["content"] = None if message.get("tool_calls") else ""
        else:
            raise ChatTemplateError(f"must be a string or a list of parts, not {type(content).__name__}", field=f"messages[{index}].content")
        if message.get("tool_calls"):
            calls = message["tool_calls"]
            shaped["tool_calls"] = [_with_parsed_arguments(call, f"messages[{index}].tool_calls[{i}]") for i, call in enumerate(calls)]
        return shaped

    def _known_role(self, role: str, field: str) -> str:
        """What the template calls ``role``, which is one of OpenAI's, or one that the template speaks of.

        Many write whatever role they are given, a misspelt one too, or leave a message of one they don't know out without a word.
        """
        if role not in OPENAI_ROLES and not any(f"{quote}{role}{quote}" in self.source for quote in "'\""):
            message = f"{role!r} is none of {', '.join(sorted(OPENAI_ROLES))}, and the model's chat template knows no other of that name"
            raise ChatTemplateError(message, field=field)
        place = self._places.get(role)
        if place is None:
            if len(self._places) >= MAX_KNOWN_ROLES:
                self._places.clear()
            place = self._places[role] = self._place_of(role)
        if role == "developer" and place != "shown":
            return "system"  # OpenAI's newer name of it
        if place == "lost":
            raise ChatTemplateError(f"the model's chat template has no place for the role {role!r}", field=field)
        return role  # one that the template refuses is refused in its own words

    def _place_of(self, role: str) -> RolePlace:
        content: Any = PROBE if self._takes_strings else [{"type": "text", "text": PROBE}]
        question: Any = "a" if self._takes_strings else [{"type": "text", "text": "a"}]
        messages = [{"role": "user", "content": question}, {"role": role, "content": content}]
        variables = {**self._special_tokens, "messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return "shown" if PROBE in self._rendered(variables) else "lost"
        except ChatTemplateError:
            return "refused"

    def _shows(self, content: Any) -> bool:
        """Whether a user message with this content is rendered as its text, not refused or printed as a Python object."""
        variables = {**self._special_tokens, "messages": [{"role": "user", "content": content}], "add_generation_prompt": True}
        try:
            text = self._rendered({**variables, "tools": None, "documents": None})
        except ChatTemplateError:
            return False
        return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text


def load_chat_template(config: ModelConfig, tokenizer: Tokenizer, *, for_tools: bool = False) -> ChatTemplate | None:
    """``--chat-template``'s file, else the tokenizer's template (its ``tool_use`` one for tools), else None.

    Raises ChatTemplateError on a template that does not compile, ModelFileError on an unreadable file.
    """
    if config.chat_template:
        path = Path(config.chat_template).expanduser()
        return ChatTemplate(read_template(path), tokenizer.special_tokens)
    templates = tokenizer.chat_templates
    name = "tool_use" if for_tools and "tool_use" in templates else "default"
    return ChatTemplate(templates[name], tokenizer.special_tokens) if name in templates else None


def _guarded(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except TemplateFailure as failure:
        raise ChatTemplateError(f"chat template: {failure}") from failure


def _render_in_child(children: TemplateChildren, source: str, variables: dict[str, Any]) -> str:
    try:
        task = json.dumps({"source": source, "variables": variables, "max_characters": min(REQUEST_OUTPUT_CHARACTERS, MAX_OUTPUT_CHARACTERS)})
    except (TypeError, ValueError) as error:
        raise ChatTemplateError(f"chat template: the variables are not plain JSON ({error})") from error
    try:
        exit_code, output = children.run(task.encode())
    except subprocess.TimeoutExpired as error:
        raise ChatTemplateOverLimit(f"chat template: rendering took longer than {error.timeout:.0f} s") from error
    if exit_code != 0:
        raise ChatTemplateOverLimit("chat template: rendering went over the limit on processor time or memory for templates in a request")
    try:
        answer = msgspec.json.decode(output)
    except msgspec.DecodeError:
        raise ChatTemplateError("chat template: it writes half of a surrogate pair, which is no character") from None
    if "error" in answer:
        raise ChatTemplateError(f"chat template: {answer['error']}")
    return str(answer["text"])


def _joined_text(index: int, parts: Sequence[Any]) -> str:
    texts: list[str] = []
    for position, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            message = f"this model takes text parts only, got {kind or type(part).__name__}"
            raise ChatTemplateError(message, field=f"messages[{index}].content[{position}]")
        texts.append(part["text"])
    return "".join(texts)


def _with_parsed_arguments(call: Any, where: str) -> Any:
    """Clients send a call's arguments as JSON text; templates print them as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        # Unlike Python's own, it takes no halves of surrogate pairs, which no tokenizer could.
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        message = f"the arguments of {function.get('name')!r} are not JSON ({error})"
        raise ChatTemplateError(message, field=f"{where}.function.arguments") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        last = content[-1] if content else None
        if not isinstance(last, Mapping) or not isinstance(last.get("text"), str):
            raise ChatTemplateError("the last message must end in text", field="continue_final_message")
        return {**message, "content": [*content[:-1], {**last, "text": last["text"] + END_MARK}]}
    return {**message, "content": (content or "") + END_MARK}


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Templates test ``if tools``; an empty list means none."""
    return list(tools) if tools else None
