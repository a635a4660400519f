"""Fixtures for every test: where the default model is, and golden data."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Each new HTTP client would read the certificates of all authorities, which takes 28 ms of the processor: the tests make hundreds of
# clients, of servers that have a certificate of their own or none. A folder's are read when one is looked for.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(GOLDEN)


def find_default_model() -> Path | None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    candidates = [os.environ.get("FASTENGINE_TEST_MODEL"), cache / "fastengine" / "models" / DEFAULT_MODEL_FILE]
    return next((Path(c) for c in candidates if c and Path(c).is_file()), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--interleavings", type=int, default=25, help="random interleavings of control calls (tests/e2e)")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; ``scripts/test.sh`` fetches it, and refuses to run without."""
    path = find_default_model()
    if path is None:
        pytest.skip("the default model is not here: run scripts/test.sh, or set FASTENGINE_TEST_MODEL")
    return path


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary directory whose path is short enough for Unix sockets, which pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="fe-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def load_golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())
