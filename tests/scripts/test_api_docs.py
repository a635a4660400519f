"""The table of request fields in docs/api.md is what the code says."""

from __future__ import annotations

from pathlib import Path

from scripts.api_fields import fields_table

ROOT = Path(__file__).parents[2]


def test_the_table_is_up_to_date() -> None:
    assert (ROOT / "docs" / "api.md").read_text().endswith(f"\n{fields_table()}\n"), "run scripts/api_fields.py and paste what it prints"
