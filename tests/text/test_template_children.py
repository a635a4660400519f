"""Processes for the templates of requests: one is ready before it is asked for, and none is left behind."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastengine.text import template_children
from fastengine.text.template_children import TemplateChildren


def task(source: str) -> bytes:
    return json.dumps({"source": source, "variables": {}, "max_characters": 100}).encode()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes in the order they were started."""
    children: list[Any] = []
    start = template_children._start
    monkeypatch.setattr(template_children, "_start", lambda: (children.append(start()), children[-1])[1])
    return children


def test_a_spare_takes_the_task_and_has_a_successor(started: list[Any]) -> None:
    children = TemplateChildren()
    children.prepare()
    children.prepare()
    assert len(started) == 1
    for number in (1, 2):
        code, output = children.run(task("{{ 6 * 7 }}"))
        assert (code, json.loads(output)) == (0, {"text": "42"})
        assert started[number - 1].returncode == 0
        assert len(started) == number + 1
    children.close()
    assert [child.returncode for child in started] == [0, 0, -9]


def test_without_a_spare_one_is_started_for_the_task_alone(started: list[Any]) -> None:
    code, output = TemplateChildren().run(task("a"))
    assert (code, json.loads(output), len(started)) == (0, {"text": "a"}, 1)


def test_a_spare_that_died_is_replaced(started: list[Any]) -> None:
    children = TemplateChildren()
    children.prepare()
    started[0].kill()
    started[0].wait()
    assert json.loads(children.run(task("a"))[1]) == {"text": "a"}
    children.close()


def test_what_takes_too_long_is_killed(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_children, "TIMEOUT_S", 0.2)
    children = TemplateChildren()
    children.prepare()
    with pytest.raises(subprocess.TimeoutExpired):
        children.run(task("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"))
    assert started[0].returncode == -9
    children.close()


def test_a_process_whose_parent_closes_its_input_ends() -> None:
    child = template_children._start()
    child.stdin.close()  # type: ignore[union-attr]
    assert child.wait(10) == 1
    child.stdout.close()  # type: ignore[union-attr]


def test_several_threads(started: list[Any]) -> None:
    children = TemplateChildren()
    children.prepare()
    with ThreadPoolExecutor(3) as threads:
        outputs = list(threads.map(lambda i: children.run(task(f"{i}"))[1], range(6)))
    assert [json.loads(output)["text"] for output in outputs] == list("012345")
    children.close()
    assert all(child.returncode is not None for child in started)
