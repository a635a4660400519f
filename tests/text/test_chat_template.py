"""Chat templates: the golden prompts, what templates may use, what they may not, and that none hangs the server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fastengine.config import ModelConfig
from fastengine.model_files import ModelFileError
from fastengine.text import template_children, template_sandbox
from fastengine.text.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from fastengine.text.tokenizer import Tokenizer
from tests.conftest import load_golden

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


@pytest.mark.model
def test_golden_prompts(smollm: Tokenizer) -> None:
    template = load_chat_template(ModelConfig(), smollm)
    assert template is not None
    for case in load_golden("smollm2_q4_1.json"):
        assert smollm.encode_chat(template.render(case["messages"])) == case["prompt_ids"]


def test_generation_prompt_and_special_tokens() -> None:
    assert render("{{ bos_token }}" + CHATML) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_blocks_are_trimmed_as_templates_expect() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert render(source) == "hi\nend"


def test_variables_of_a_template() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "naïve <b>"}}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"type": "function", "function": {"name": "f", "description": "naïve <b>"}}]'
    assert "\n  " in render("{{ tools | tojson(indent=2) }}", tools=tools)
    assert render("{% if tools %}yes{% else %}no{% endif %}", tools=[]) == "no"
    assert render("{{ documents[0].title }}", documents=[{"title": "t"}]) == "t"
    assert render("{% if enable_thinking %}on{% endif %}", enable_thinking=True) == "on"
    assert render("{{ bos_token }}", bos_token="mine") == "<s>"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_extensions() -> None:
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!") == "hi!"
    assert render("{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}") == "6"


def test_a_template_may_refuse() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "line 1"),
        ("\n\n{{ x", "line 3"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[7].content.x }}", "has no|undefined"),
        ("{% include 'other' %}", "no loader|TypeError"),
        ("{{ none + 'x' }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
        ("(" * 10 + "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "Recursion|Memory|nested|parentheses"),
    ],
)
def test_broken_templates(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ messages.append.__self__.__class__.__init__.__globals__ }}",
    "{{ (messages | attr('__class__')).__name__ }}",
    "{{ messages | map(attribute='__class__') | list | first | attr('__mro__') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': messages}) }}",
    "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}",
    "{% set f = '{0.__class__.__mro__}'.format %}{{ f(messages) }}",
    "{{ ['{0.__class__.__mro__}'] | map('format', messages) | list | first | attr('__class__') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ (messages | tojson).__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages.clear() }}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ range(1000000) | length }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{{ messages.sort.__func__ }}",
    "{{ ().__class__.__bases__[0].__subclasses__()[0].gi_frame.f_globals }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_sandbox_escapes_are_refused(source: str) -> None:
    template = ChatTemplate(source, {})
    messages = [{"role": "user", "content": "hi"}]
    try:
        text = template.render(messages)
    except ChatTemplateError:
        pass
    else:  # not an error, but nothing of Python's internals came out either
        assert "class" not in text
        assert "<function" not in text
        assert "object at" not in text
    assert messages == [{"role": "user", "content": "hi"}]


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_sandbox.compile_template("{% for i in range(1000) %}0123456789{% endfor %}")
    assert len(template_sandbox.render_template(template, {}, 10_000)) == 10_000
    with pytest.raises(template_sandbox.TemplateFailure, match="longer than 9999 characters"):
        template_sandbox.render_template(template, {}, 9999)


# Content ---------------------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "Count from"}, {"type": "text", "text": " 1 to 20."}]
PARTS_TEMPLATE = "{% for m in messages %}{% if m.content is string %}S:{{ m.content }}{% else %}{% for p in m.content %}P:{{ p.text }};{% endfor %}{% endif %}{% endfor %}"
ONLY_PARTS_TEMPLATE = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"


def test_parts_are_joined_unless_the_template_takes_them() -> None:
    message = [{"role": "user", "content": PARTS}]
    assert "user\nCount from 1 to 20.<|im_end|>" in render(CHATML, message)
    assert render("{{ messages[0].content }}", message) == "Count from 1 to 20."
    assert render(PARTS_TEMPLATE, message) == "P:Count from;P: 1 to 20.;"
    assert render(PARTS_TEMPLATE) == "S:hi"
    assert render(ONLY_PARTS_TEMPLATE) == "[hi]"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text", {}])
def test_other_parts_are_refused(part: Any) -> None:
    with pytest.raises(ChatTemplateError, match="this model takes text parts only"):
        render(CHATML, [{"role": "user", "content": [part]}])


def test_missing_content_and_tool_calls() -> None:
    assert render(CHATML, [{"role": "assistant"}], add_generation_prompt=False) == "<|im_start|>assistant\n<|im_end|>\n"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, true]}'}}
    source = "{% if messages[0].content is none %}{{ messages[0].tool_calls[0].function.arguments.a[0] + 1 }}{% endif %}"
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(source, messages) == "2"
    assert call["function"]["arguments"] == '{"a": [1, true]}'
    with pytest.raises(ChatTemplateError, match="arguments of 'f' are not JSON"):
        render(source, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}])
    with pytest.raises(ChatTemplateError, match="must be a string or a list"):
        render(CHATML, [{"role": "user", "content": 7}])


def test_continue_final_message() -> None:
    messages = [*USER, {"role": "assistant", "content": "Sure, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, messages, **options) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure, "
    trimming = CHATML.replace("message['content']", "message['content'] | trim")
    assert render(trimming, messages, **options).endswith("assistant\nSure, ")
    parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    assert render(ONLY_PARTS_TEMPLATE, parts, **options) == "[hi][A][B"
    with pytest.raises(ChatTemplateError, match="can't both be set"):
        render(CHATML, messages, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="does not show"):
        render("nothing", messages, **options)
    with pytest.raises(ChatTemplateError, match="needs a message"):
        render("nothing", [], **options)


# Where templates come from ---------------------------------------------------------------------------


def test_sources(byte_level: Tokenizer, word_piece: Tokenizer, tmp_path: Path) -> None:
    own = load_chat_template(ModelConfig(), byte_level)
    assert own is not None
    assert own.render(USER) == "<s>hi"
    assert load_chat_template(ModelConfig(), word_piece) is None
    file = tmp_path / "t.jinja"
    file.write_text("from a file")
    from_file = load_chat_template(ModelConfig(chat_template=str(file)), byte_level)
    assert from_file is not None
    assert from_file.render(USER) == "from a file"
    file.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ModelFileError, match="may have"):
        load_chat_template(ModelConfig(chat_template=str(file)), byte_level)
    with pytest.raises(ModelFileError, match="can't be read"):
        load_chat_template(ModelConfig(chat_template=str(tmp_path / "none")), byte_level)


def test_a_request_template_gives_the_same_text() -> None:
    template = ChatTemplate("{{ bos_token }}" + CHATML, {"bos_token": "<s>"}, isolated=True)
    messages = [{"role": "user", "content": [{"type": "text", "text": "naïve 你好 😀"}]}]
    assert template.render(messages) == render("{{ bos_token }}" + CHATML, messages)
    with pytest.raises(ChatTemplateError, match="line 1"):
        ChatTemplate("{% for %}", {}, isolated=True).render(USER)
    with pytest.raises(ChatTemplateError, match="are allowed"):
        ChatTemplate("x" * 300_000, {}, isolated=True)


HOSTILE = [
    "{{ 'a' * 10 ** 10 }}",
    "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ ''.__class__.__mro__ }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_request_template_costs_a_child_process(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}, isolated=True).render(USER)
    assert time.monotonic() - start < template_children.TIMEOUT_S + 5


def test_an_endless_request_template_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_children, "TIMEOUT_S", 1.0)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=r"took longer than 1 s|over the limit"):
        ChatTemplate(source, {}, isolated=True).render(USER)


SHOWS_ALL = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NAMES_ONE = "{% for m in messages %}{% if m.role == 'ipython' %}[ran]{% endif %}{{ m.content }}{% endfor %}"
KNOWS_THREE = "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
REFUSES = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users') }}{% endif %}{{ m.content }}{% endfor %}"


def test_roles_are_the_templates() -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "ipython", "content": "b"}]
    assert render(NAMES_ONE, asked) == "a[ran]b"
    # What a template writes for whatever it is given is no sign that it knows it.
    with pytest.raises(ChatTemplateError, match="'ipython' is none of assistant, developer, function") as error:
        render(SHOWS_ALL, asked)
    assert error.value.field == "messages[1].role"
    asked[1]["role"] = "function"
    assert render(SHOWS_ALL, asked) == "[user]a[function]b"
    with pytest.raises(ChatTemplateError, match="no place for the role 'function'") as error:
        render(KNOWS_THREE, asked)
    assert error.value.field == "messages[1].role"
    with pytest.raises(ChatTemplateError, match="only users") as error:
        render(REFUSES, asked)
    assert error.value.field is None
    # Who brings a template knows what roles it has.
    asked[1]["role"] = "zz"
    assert ChatTemplate(SHOWS_ALL, {}, isolated=True).render(asked) == "[user]a[zz]b"


def test_developers_are_the_system_where_the_template_does_not_know_them() -> None:
    asked = [{"role": "developer", "content": "a"}]
    assert render(SHOWS_ALL, asked) == "[developer]a"
    assert render(KNOWS_THREE, asked) == "[system]a"


def test_a_bound_on_what_is_remembered_of_roles() -> None:
    template = ChatTemplate("".join(f"{{# 'r{i}' #}}" for i in range(200)) + SHOWS_ALL, {})
    for i in range(200):
        assert template.render([{"role": f"r{i}", "content": "a"}]) == f"[r{i}]a"
    assert len(template._places) <= 64
