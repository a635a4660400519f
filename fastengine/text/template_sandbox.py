"""Jinja in a sandbox: compiling and rendering a chat template, here or in a process of its own.

Covered by the sandbox: no attribute or item that leads to Python's internals, no change to the values
passed in, no files, at most 100,000 elements from ``range``, and a bound on the output. Not covered:
nested loops and large intermediate strings can still take time and memory, so a template that comes
with a request is rendered by ``python -m fastengine.text.template_sandbox``, a child process with hard
limits on both, which is killed past them.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARACTERS = 64 << 20
# Limits of the child process, once it has begun; it gives way to whatever else runs.
CPU_LIMIT_S = 1.0
NICENESS = 10
MEMORY_LIMIT_BYTES = 1 << 30


class TemplateFailure(Exception):
    """A template can't be compiled or rendered; the message is for the one who sent it."""


class GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's text for training; its contents are rendered as they are."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment chat templates are written for: Hugging Face's block trimming, filters and functions."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def compile_template(source: str) -> jinja2.Template:
    """Raises TemplateFailure with the line of a syntax error."""
    try:
        return make_environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFailure(f"line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, RecursionError, ValueError, OverflowError, MemoryError, SyntaxError) as error:
        raise TemplateFailure(f"{type(error).__name__}: {error}") from error


def render_template(template: jinja2.Template, variables: dict[str, Any], max_characters: int = MAX_OUTPUT_CHARACTERS) -> str:
    """The whole text. Whatever a template raises becomes a TemplateFailure: it is the template's or its input's fault."""
    parts: list[str] = []
    length = 0
    try:
        for part in template.generate(variables):
            length += len(part)
            if length > max_characters:
                raise TemplateFailure(f"the output is longer than {max_characters} characters")
            parts.append(part)
    except TemplateFailure:
        raise
    except jinja2.TemplateError as error:
        raise TemplateFailure(error.message or type(error).__name__) from error
    except Exception as error:
        raise TemplateFailure(f"{type(error).__name__}: {error}") from error
    return "".join(parts)


def _to_json(
    value: Any, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False, ensure_ascii: bool = False
) -> str:
    """Plain JSON, where Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def main() -> None:
    """Read ``{"source", "variables", "max_characters"}`` from standard input, write ``{"text"}`` or ``{"error"}``."""
    os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # its signal ends the process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    task = json.load(sys.stdin)
    try:
        answer = {"text": render_template(compile_template(task["source"]), task["variables"], task["max_characters"])}
    except TemplateFailure as failure:
        answer = {"error": str(failure)[:2000]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
