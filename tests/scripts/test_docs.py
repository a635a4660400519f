"""What the Markdown pages name exists: files, links and flags."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fastengine.config import EngineConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
FOLDERS = "fastengine|worker|custom_ops|scripts|tests|benchmarks|docs"


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_files_exist(page: Path) -> None:
    names = re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_map_names_what_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    block = text.split("## The map")[1].split("```")[1]
    missing, top = [], ""
    for line in block.splitlines():
        if folder := re.match(rf"({FOLDERS})/", line):
            top = folder[1]
        elif line.startswith("  ") and not line.startswith("   "):
            # Two or more names of one line are set apart by two spaces, the last from its text by more.
            names = re.match(r"  ((?:[\w.]+/?  ?)+)", line + "  ")
            assert names, line
            missing += [f"{top}/{name}" for name in names[1].split() if re.search(r"/$|\.\w+$", name) and not (ROOT / top / name).exists()]
    assert missing == []


def test_the_flags_of_the_readme_exist_with_these_defaults() -> None:
    known = EngineConfig().flat()
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for names, defaults in rows:
        for flag, default in zip(re.findall(r"`--([\w-]+)", names), defaults.split(", "), strict=True):
            name = flag.replace("-", "_")
            assert name in known or name == "config", flag
            if re.fullmatch(r"`.*`|\d+", default) and not default.startswith("`FASTENGINE"):
                assert str(known[name]) == default.strip("`"), flag


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_examples_are_python(page: Path) -> None:
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(example)
