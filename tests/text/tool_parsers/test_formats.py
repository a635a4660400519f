"""Every format: its own rendering of random calls read back at any split, malformed calls as content, nothing lost."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastengine.text.plugins import TOOL_PARSERS, load_parsers
from fastengine.text.tool_parsers import ToolParser, tool_request
from fastengine.text.tool_parsers.lists import NamedCallParser, RequiredCallsParser
from tests.text.tool_parsers.parsing import ARGUMENTS, TOOLS, calls_of, content_of, cut, parse, parse_everywhere, without_broken

SPECS = tool_request(TOOLS).tools
FORCED: dict[str, type[ToolParser]] = {"required": RequiredCallsParser}
CLASSES = {**TOOL_PARSERS, **FORCED}
NAMES = sorted(CLASSES)


def make(name: str, *, whole: bool = False) -> ToolParser:
    parser = CLASSES[name](SPECS)
    parser.whole_calls = whole
    return parser


def hermes(calls: list[tuple[str, Any]], dump: Any) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {dump(arguments)}}}\n</tool_call>' for name, arguments in calls)


def array(key: str, calls: list[tuple[str, Any]], dump: Any) -> str:
    return "[" + ", ".join(f'{{"name": "{name}", "{key}": {dump(arguments)}}}' for name, arguments in calls) + "]"


def deepseek(calls: list[tuple[str, Any]], dump: Any, head: str, tail: str) -> str:
    each = [f"<｜tool▁call▁begin｜>{head.format(name)}{dump(arguments)}{tail}<｜tool▁call▁end｜>" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


RENDERINGS = {
    "hermes": ("hermes", hermes),
    "ernie": ("ernie-x1", hermes),
    "llama": (
        "llama3-json",
        lambda calls, dump: "; ".join(f'{{"name": "{n}", "parameters": {dump(a)}}}' for n, a in calls),
    ),
    "llama-tag": (
        "llama3-json",
        lambda calls, dump: "".join(f'<|python_tag|>{{"type": "function", "name": "{n}", "parameters": {dump(a)}}}' for n, a in calls),
    ),
    "mistral-list": ("mistral", lambda calls, dump: "[TOOL_CALLS] " + array("arguments", calls, dump)),
    "mistral-names": ("mistral", lambda calls, dump: "".join(f"[TOOL_CALLS]{n}{dump(a)}" for n, a in calls)),
    "mistral-ids": (
        "mistral",
        lambda calls, dump: "".join(f"[TOOL_CALLS]{n}[CALL_ID]abcdefg{i:02}[ARGS]{dump(a)}" for i, (n, a) in enumerate(calls)),
    ),
    "deepseek-v3": ("deepseek", lambda calls, dump: deepseek(calls, dump, "function<｜tool▁sep｜>{}\n```json\n", "\n```")),
    "deepseek-v31": ("deepseek", lambda calls, dump: deepseek(calls, dump, "{}<｜tool▁sep｜>", "")),
    "required": ("required", lambda calls, dump: array("parameters", calls, dump)),
}
DUMPS = {
    "ascii": json.dumps,
    "unicode": lambda value: json.dumps(value, ensure_ascii=False),
    "indented": lambda value: json.dumps(value, ensure_ascii=False, indent=2),
}
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 2000), max_size=12)
MARKERS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
]


@pytest.mark.parametrize("rendering", RENDERINGS)
@settings(max_examples=40, deadline=None)
@given(calls=CALLS, style=st.sampled_from(sorted(DUMPS)), cuts=CUTS)
def test_calls_read_back(rendering: str, calls: list[tuple[str, Any]], style: str, cuts: list[int]) -> None:
    name, render = RENDERINGS[rendering]
    dump = DUMPS[style]
    text = render(calls, dump)
    result = parse(make(name), cut(text, cuts))
    # The arguments are the model's own text, to the letter.
    assert result == [(tool, dump(arguments)) for tool, arguments in calls]


@pytest.mark.parametrize("rendering", RENDERINGS)
@pytest.mark.parametrize("marker", MARKERS)
def test_markers_in_arguments_are_text(rendering: str, marker: str) -> None:
    name, render = RENDERINGS[rendering]
    calls = [("f", {"a": f"x{marker}y", marker: [0, -1.5e3, True, None, {}]}), ("get_weather", {})]
    text, written = render(calls, json.dumps), json.dumps(marker)[1:-1]
    found = [match.start() for match in re.finditer(re.escape(written), text)]
    assert len(found) >= 2
    places = [place for start in found for place in range(max(1, start), start + len(written) + 1)]
    assert calls_of(parse_everywhere(lambda: make(name), text, places)) == calls


PYTHON_ARGUMENTS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,5}", fullmatch=True),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), PYTHON_ARGUMENTS), min_size=1, max_size=3),
    tagged=st.booleans(),
    comma=st.sampled_from(["", ",", " ,\n"]),
    cuts=CUTS,
)
def test_python_calls_read_back(calls: list[tuple[str, Any]], tagged: bool, comma: str, cuts: list[int]) -> None:
    each = [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())}{comma if arguments else ''})" for name, arguments in calls]
    text = f"[{', '.join(each)}{comma}]"
    if tagged:
        text = f"<|python_start|>{text}<|python_end|>"
    result = parse(make("pythonic"), cut(text, cuts))
    assert calls_of(result) == calls
    assert content_of(result) == ""


FRAGMENTS = [
    *MARKERS,
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": ', '"arguments": ', '{"a": 1}', '"f"', "{", "}", "[", "]", "(", ")", ",", ": "),
    *(
        "f",
        "[f(",
        "a=",
        "'x'",
        '"x"',
        "function",
        "\n",
        " ",
        "```json",
        "```",
        ";",
        "12",
        "tru",
        "null",
        "<",
        "get_weather",
        '{"name": "f", "arguments": {"a": ',
    ),
]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None)
@given(parts=st.lists(st.sampled_from([*FRAGMENTS, "Zq"]), max_size=14), cuts=CUTS)
def test_any_text_at_any_cut(name: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = parse(make(name), [text])
    assert parse(make(name), cut(text, cuts)) == whole
    assert parse(make(name), list(text)) == whole
    # Who waits for all of it gets the same, but for calls that are none.
    assert parse(make(name, whole=True), cut(text, cuts)) == without_broken(whole)
    for call in whole:
        if call[0] not in ("content", "reasoning"):
            assert is_json(call[1]) == (len(call) == 2), call
    # Words come out once, wherever they stand.
    assert "".join(f"{item[0]} {item[1]}" for item in without_broken(whole)).count("Zq") == text.count("Zq")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from([*FRAGMENTS, "Zq"]), max_size=14), cuts=CUTS)
def test_any_text_that_is_cut_off(name: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    told = parse(make(name), cut(text, cuts), end_cut=True)
    assert parse(make(name, whole=True), [text], end_cut=True) == without_broken(told)


@pytest.mark.parametrize("rendering", RENDERINGS)
@settings(max_examples=60, deadline=None)
@given(call=st.tuples(st.just("f"), ARGUMENTS), place=st.integers(0, 10**6), cuts=CUTS)
def test_a_call_that_is_not_finished_is_text_to_the_letter(rendering: str, call: tuple[str, Any], place: int, cuts: list[int]) -> None:
    name, render = RENDERINGS[rendering]
    text = render([call], json.dumps)
    text = f"Well. {text}" if name not in ("llama3-json", "required") else text
    arguments_end = text.rindex("}", 0, text.rindex("}")) + 1 if text.count("}") > 1 else text.rindex("}") + 1
    text = text[: place % arguments_end]
    result = parse(make(name), cut(text, cuts))
    assert content_of(result) == text
    assert all(len(item) == 3 for item in result if item[0] != "content")
    assert parse(make(name, whole=True), cut(text, cuts)) == ([("content", text)] if text else [])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="ab <>[]|/t\n", max_size=30), cuts=CUTS)
def test_text_without_calls_is_unchanged(name: str, text: str, cuts: list[int]) -> None:
    assert content_of(parse(make(name), cut(text, cuts))) == text


BROKEN = {
    "hermes": [
        "<tool_call>",
        "<tool_call>not json</tool_call> more",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "f"',
        "a < b <tool_ca",
    ],
    "llama3-json": ['{"answer": 42}', '{"name": "unknown", "parameters": {}}', '{"name": "f", "parameters": 3}', "{", "x <|python_tag|>print(1)"],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] some words",
        "[TOOL_CALLS] [1]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS]f[ARGS]1",
        "[TOOL_CALLS]f[CALL_ID][ARGS]{}",
        "[TOOL" + "x" * 200,
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>words",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>words",
        "<｜tool▁call▁begin｜>kind<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + "f" * 300,
        "<｜tool▁call▁begin｜>two\nlines<｜tool▁sep｜>{}",
    ],
    "pythonic": ["[1, 2, 3]", "[unknown()]", "[f]", "[f(1)]", "[f(a)", "[", "see <|python_start|>x", "[]"],
    "required": ["[]", '{"name": "f", "parameters": {}}', "[1]", '[{"name": "unknown", "parameters": {}}]'],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert parse_everywhere(lambda: make(name), text) == [("content", text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            'Hm. <tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call> ok',
            [("content", "Hm."), ("f", '{"a": 1, ', "broken"), ("content", ' <tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call> ok')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
            [("f", '{"a": 1', "broken"), ("content", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
            [("f", '{"a": ', "broken"), ("content", '<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>'), ("f", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": <tool_call>{"name": "f"}</tool_call>',
            [("f", '{"a": ', "broken"), ("content", '<tool_call>{"name": "f", "arguments": {"a":'), ("f", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f"}</tool_call>', [("f", "{}"), ("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_', [("f", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "two\nlines\t"}}</tool_call>', [("f", '{"a": "two\\nlines\\t"}')]),
        ("hermes", 'Let me see. \n\n<tool_call>{"name": "f"}</tool_call>\n\n', [("content", "Let me see."), ("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\nand text ', [("f", "{}"), ("content", "\nand text ")]),
        ("llama3-json", '{"name": "f", "parameters": {a}}', [("content", '{"name": "f", "parameters": {a}}')]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g words', [("f", '{"a": 1}'), ("content", "[TOOL_CALLS]g words")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, x', [("f", '{"a": 1}'), ("content", ", x")]),
        ("mistral", '[TOOL_CALLS]f{"a": 1', [("f", '{"a": ', "broken"), ("content", '[TOOL_CALLS]f{"a": 1')]),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{1}<｜tool▁call▁end｜>x",
            [("content", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{1}<｜tool▁call▁end｜>x")],
        ),
        ("pythonic", "[f(a=1, 5)]", [("f", '{"a": 1', "broken"), ("content", "[f(a=1, 5)]")]),
        ("pythonic", "[f(a=(1, 2))]", [("f", '{"a": ', "broken"), ("content", "[f(a=(1, 2))]")]),
        ("pythonic", "[f(a=1, a=2)]", [("f", '{"a": 1', "broken"), ("content", "[f(a=1, a=2)]")]),
        ("pythonic", "[f(a=1), f(a=(1, 2))]", [("f", '{"a": 1}'), ("f", '{"a": ', "broken"), ("content", ", f(a=(1, 2))]")]),
    ],
)
def test_calls_that_go_wrong(name: str, text: str, expected: list[Any]) -> None:
    assert parse_everywhere(lambda: make(name), text) == expected
    assert parse_everywhere(lambda: make(name, whole=True), text) == without_broken(expected)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', [("f", '{"a": "cut')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 12', [("f", '{"a": 12')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 12}', [("f", '{"a": 12}')]),
        ("hermes", '<tool_call>{"name": "f", "argum', [("content", '<tool_call>{"name": "f", "argum')]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [', [("f", '{"a": [')]),
        ("llama3-json", '{"name": "f", "parameters": {"a": "b', [("f", '{"a": "b')]),
        ("pythonic", '[f(a="b"', [("f", '{"a": "b"')]),
    ],
)
def test_calls_that_are_cut_off_keep_the_arguments_they_have(name: str, text: str, expected: list[Any], whole: bool) -> None:
    assert parse(make(name, whole=whole), [text], end_cut=True) == expected
    assert parse(make(name, whole=whole), list(text), end_cut=True) == expected


def test_the_named_call() -> None:
    specs = tool_request(TOOLS, {"type": "function", "function": {"name": "f"}}).tools
    assert parse_everywhere(lambda: NamedCallParser(specs), ' {"a": "}"} ') == [("f", '{"a": "}"}')]
    assert parse_everywhere(lambda: NamedCallParser(specs), "no JSON") == [("content", "no JSON")]
    assert parse(NamedCallParser(specs), ['{"a": "cu'], end_cut=True) == [("f", '{"a": "cu')]
    assert parse_everywhere(lambda: NamedCallParser(specs), '{"a": "cu') == [("f", '{"a": "cu', "broken"), ("content", '{"a": "cu')]


def test_arguments_stream_as_they_come() -> None:
    parser = make("hermes")
    assert [d.text for d in parser.feed('<tool_call>{"name": "f", "arguments": {"a": "one')] == ["", '{"a": "one']
    assert [d.text for d in parser.feed(" two")] == [" two"]
    assert [d.text for d in parser.feed("\\")] == []
    assert [d.text for d in parser.feed("n!")] == ["\\n!"]


def test_a_call_that_breaks_before_its_first_argument_has_promised_nothing() -> None:
    for text in ('{"name": "f", "arguments": {city}}', '{"name": "f", "arguments": {"city', '{"name": "f", "arguments": {}, oops}'):
        assert parse_everywhere(lambda: make("hermes"), f"<tool_call>{text}</tool_call>") == [("content", f"<tool_call>{text}</tool_call>")]


def test_ids() -> None:
    (call,) = [d for d in make("hermes").feed('<tool_call>{"name": "f"}') if d.name]
    assert call.call_id is not None
    assert call.call_id.startswith("call_")
    assert len(call.call_id) == len("call_") + 24
    (call,) = [d for d in make("mistral").feed('[TOOL_CALLS]f{"a":') if d.name]
    assert call.call_id is not None
    assert len(call.call_id) == 9
    (call,) = [d for d in make("mistral").feed("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}") if d.name]
    assert call.call_id == "abcdefghi"


@pytest.mark.parametrize("name", [*TOOL_PARSERS, "DeepSeek_V3", "LLAMA3_JSON"])
def test_names(name: str) -> None:
    assert issubclass(load_parsers().tool_parser(name), ToolParser)
