"""The process itself: quick to answer, light, and gone when told or orphaned."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fastengine.config import EngineConfig
from fastengine.ipc.process import EXIT_HOPELESS
from fastengine.ipc.runtime_dir import RuntimeDir
from tests.frontend.fake_engine import FakeEngine


@pytest.fixture
def runtime() -> Iterator[RuntimeDir]:
    with tempfile.TemporaryDirectory() as root:
        runtime = RuntimeDir.create(Path(root))
        yield runtime
        runtime.remove()


def start(runtime: RuntimeDir, model: Path) -> tuple[subprocess.Popen[bytes], str]:
    runtime.file("config.json").write_bytes(EngineConfig.from_flags(model=str(model)).to_json())
    listener = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-m", "fastengine.frontend", "--runtime-dir", str(runtime.path), "--client-index", "0"]
    command += ["--socket-fd", str(listener.fileno())]
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=subprocess.PIPE)
    listener.close()
    return process, url


def test_health_answers_while_everything_else_still_starts_and_sigterm_ends_it(runtime, default_model):
    process, url = start(runtime, default_model)
    try:
        with httpx.Client(base_url=url, timeout=20) as http:
            reply = http.get("/health")  # the listening socket queues it until the process is there
            assert reply.status_code == 503
            assert reply.json()["state"] == "starting"
            assert reply.headers["retry-after"]
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
            engine = FakeEngine(runtime)
            deadline = time.monotonic() + 20
            while http.get("/health").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "return_token_ids": True}
            answer = http.post("/v1/chat/completions", json=body).json()
            assert len(answer["choices"][0]["message"]["completion_token_ids"]) == 3
            assert answer["model"] == default_model.stem
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "paddle" not in mapped
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        engine.stop()
    finally:
        process.kill()
        process.wait()


def test_sigterm_lets_running_requests_finish(runtime, default_model):
    engine = FakeEngine(runtime, step_s=0.02)
    process, url = start(runtime, default_model)
    try:
        with httpx.Client(base_url=url, timeout=20) as http:
            while http.get("/health").status_code != 200:
                time.sleep(0.02)
            body = {"prompt": "a b c", "max_tokens": 50, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(10) == 0
        assert engine.aborts == []
    finally:
        process.kill()
        process.wait()
        engine.stop()


def test_a_tokenizer_that_cannot_be_loaded_ends_the_process_with_its_reason(runtime, tmp_path):
    process, _ = start(runtime, tmp_path)
    try:
        _, errors = process.communicate(timeout=20)
        assert process.returncode == EXIT_HOPELESS
        assert str(tmp_path).encode() in errors
    finally:
        process.kill()


def test_it_does_not_outlive_its_parent(runtime, default_model):
    """The parent here is a shell that starts the process in the background and is killed."""
    runtime.file("config.json").write_bytes(EngineConfig.from_flags(model=str(default_model)).to_json())
    listener = socket.create_server(("127.0.0.1", 0))
    fd = listener.fileno()
    script = f"{sys.executable} -m fastengine.frontend --runtime-dir {runtime.path} --client-index 0 --socket-fd {fd} & echo $!; wait"
    parent = subprocess.Popen(["/bin/sh", "-c", script], pass_fds=[fd], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert httpx.get(url + "/health", timeout=20).status_code == 503
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the process outlived its parent"
        time.sleep(0.02)
    listener.close()
    assert not os.path.exists(f"/proc/{child}") or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]
