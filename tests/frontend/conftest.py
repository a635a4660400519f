from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.harness import EOS, ApiServer


def run_servers() -> Iterator[Callable[..., ApiServer]]:
    servers: list[ApiServer] = []
    # Unix sockets have short paths: pytest's tmp_path may be too long.
    with tempfile.TemporaryDirectory() as root:

        def start(*, wait: bool = True, **options: Any) -> ApiServer:
            server = ApiServer(Path(root), **options)
            servers.append(server)
            if server.engine is not None:
                server.engine.eos = EOS
            return server.wait_ready() if wait else server

        yield start
        for server in reversed(servers):
            server.stop()


@pytest.fixture
def start_server() -> Iterator[Callable[..., ApiServer]]:
    """start_server(**flags) -> a ready ApiServer over a fake engine; all are stopped at the end."""
    yield from run_servers()


@pytest.fixture(scope="module")
def shared_servers() -> Iterator[Callable[..., ApiServer]]:
    yield from run_servers()


@pytest.fixture(scope="module")
def api(shared_servers: Callable[..., ApiServer]) -> ApiServer:
    """One ready server for all tests of a module that leave it as they found it."""
    return shared_servers()
