"""The front-end benchmark measures what it says: a real API process, every token asked for, each part at work."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bench_frontend import PARTS, own_parts, run, wait_ready
from frontend_stub import stub_server

from fastengine.config import ModelConfig
from fastengine.frontend.text_service import load_model_text

GOLDEN = Path(__file__).parents[1] / "golden" / "llama"
TOKEN_IDS = [5, 6, 7, 8, 9]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The tiny Llama's text side, with a chat template."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(GOLDEN / name, tmp_path)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(tmp_path)


def test_an_api_process_streams_what_the_stub_replays(model: str) -> None:
    with stub_server(model, TOKEN_IDS) as server:
        wait_ready(server)
        cpu_s, tokens_per_chunk = run(server, 2, 2, 6)
    assert cpu_s > 0
    assert tokens_per_chunk >= 1


def test_each_part_is_measured(model: str) -> None:
    found = own_parts(load_model_text(ModelConfig(model=model)), TOKEN_IDS, 2, 50)
    assert set(found) == set(PARTS)
    assert all(value > 0 for value in found.values())
