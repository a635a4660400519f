"""Starting, stopping and being killed: nothing is left behind, and the console says why."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from fastengine.entrypoints import api_server
from fastengine.entrypoints.server_routes import paddle_package
from fastengine.model_files.architectures import ARCHITECTURES
from tests.e2e.conftest import TINY
from tests.e2e.conftest import TINY_FLAGS as FLAGS
from tests.server import Server, alive, free_port, running_server, wait_until

BODY = {"model": "default", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
CPU_PADDLE = paddle_package() == "paddlepaddle"
# What a reader of /proc needs beyond the 5 s that the kernel and the other processes get.
GONE_WITHIN_S = 5.0


def complete(server: Server, **changes: object) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json={**BODY, **changes}, timeout=60)


def expect_all_gone(pids: list[int], runtime_dir: Path) -> None:
    wait_until(lambda: not alive(pids), GONE_WITHIN_S, "the end of every process")
    wait_until(lambda: not runtime_dir.exists(), GONE_WITHIN_S, "the removal of the shared memory")


def test_sigterm_finishes_running_requests_and_exits_0() -> None:
    with running_server(TINY, *FLAGS) as server:
        pids, runtime_dir = list(server.tree()), server.runtime_dir()
        assert len(pids) >= 5  # supervisor, API process, engine, launcher, worker
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(complete(server, max_tokens=200)))
        thread.start()
        wait_until(lambda: server.metric("num_requests_running") == 1, 10, "a running request")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        thread.join(10)
        assert replies[0].status_code == 200
        assert replies[0].json()["usage"]["completion_tokens"] == 200
        expect_all_gone(pids, runtime_dir)


def test_an_api_process_that_keeps_dying_ends_the_server_which_says_so() -> None:
    with running_server(TINY, *FLAGS, "--load-format", "null") as server:
        pids, runtime_dir = list(server.tree()), server.runtime_dir()
        died: set[int] = set()
        for _ in range(6):
            wait_until(lambda: not died.issuperset(api_processes(server)), 20, "another API process")
            (pid,) = set(api_processes(server)) - died
            os.kill(pid, signal.SIGKILL)
            died.add(pid)
        assert server.wait_exit() == 1
        assert "API process 0: it died 6 times within a minute, and is started again 5 times a minute at most: the server ends" in server.output()
        expect_all_gone(pids, runtime_dir)


def api_processes(server: Server) -> list[int]:
    return [pid for pid, command in server.tree().items() if "fastengine.frontend" in command]


def test_a_second_ctrl_c_kills() -> None:
    with running_server(TINY, *FLAGS, "--shutdown-timeout", "60") as server:
        pids, runtime_dir = list(server.tree()), server.runtime_dir()
        thread = threading.Thread(target=lambda: _ignore_transport_errors(lambda: complete(server, max_tokens=250)))
        thread.start()
        wait_until(lambda: server.metric("num_requests_running") == 1, 10, "a running request")
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping" in server.output(), 5, "the announcement of the stop")
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit(15) != 0
        expect_all_gone(pids, runtime_dir)
        thread.join(10)


def stopped_in_the_middle(server: Server, pool: ThreadPoolExecutor) -> tuple[Future[httpx.Response], http.client.HTTPConnection, int]:
    """A completion and a command, neither of which comes to its end: the worker (the pid) is stopped."""
    worker = server.find("worker/__main__.py")
    os.kill(worker, signal.SIGSTOP)
    completion = pool.submit(complete, server, max_tokens=250)
    wait_until(lambda: server.metric("num_requests_running") == 1, 10, "a running request")
    command = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    command.request("POST", "/v1/weights_checksum", "{}")
    assert httpx.get(server.url + "/v1/is_paused", timeout=10).status_code == 200  # which came to the engine after the command
    return completion, command, worker


def test_a_second_sigterm_hurries() -> None:
    """And the engine does not wait for a command that nobody waits for any more, nor for a worker that does not end."""
    with running_server(TINY, *FLAGS, "--shutdown-timeout", "60") as server, ThreadPoolExecutor(1) as pool:
        pids, runtime_dir = list(server.tree()), server.runtime_dir()
        completion, command, _ = stopped_in_the_middle(server, pool)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in server.output(), 5, "the announcement of the stop")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(20) == 0
        assert completion.result(10).status_code == command.getresponse().status == 503
        assert "shutting down" in completion.result().json()["error"]["message"]
        assert "Traceback" not in server.output()
        assert "killing them" not in server.output()
        expect_all_gone(pids, runtime_dir)


def test_the_end_of_the_drain_is_a_503_and_takes_no_longer() -> None:
    with running_server(TINY, *FLAGS, "--shutdown-timeout", "1") as server, ThreadPoolExecutor(1) as pool:
        completion, command, worker = stopped_in_the_middle(server, pool)
        server.process.send_signal(signal.SIGTERM)
        assert completion.result(5).status_code == command.getresponse().status == 503
        os.kill(worker, signal.SIGCONT)
        assert server.wait_exit(20) == 0
        assert "Traceback" not in server.output()
        assert server.output().count("--shutdown-timeout") == 1


def test_sigterm_while_paused_ends_what_nobody_can_resume_at_once() -> None:
    with running_server(TINY, *FLAGS, "--shutdown-timeout", "60", "--api-workers", "2") as server, ThreadPoolExecutor(3) as pool:
        assert httpx.post(server.url + "/v1/log_level", json={"level": "ERROR"}, timeout=10).status_code == 200
        kept = [pool.submit(complete, server, max_tokens=250) for _ in range(2)]
        wait_until(lambda: server.metric("num_requests_running") == 2, 10, "running requests")
        assert httpx.post(server.url + "/v1/pause", json={"mode": "in_place"}, timeout=10).status_code == 200
        queued = pool.submit(complete, server)
        wait_until(lambda: server.metric("num_requests_waiting") == 1, 10, "a waiting request")
        pids, runtime_dir = list(server.tree()), server.runtime_dir()
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for reply in (one.result(30) for one in (*kept, queued)):
            assert reply.status_code == 503
            assert "nobody can resume it" in reply.json()["error"]["message"]
        assert server.wait_exit() == 0
        assert time.monotonic() - began < 60  # not at the drain's end
        expect_all_gone(pids, runtime_dir)
        said = server.output().partition("curl")[2]
        assert "INFO [server]" not in said  # the level holds in every process
        assert "WARNING [api-" not in said


def _ignore_transport_errors(call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except httpx.TransportError:
        return


def test_kill_9_of_the_supervisor_leaves_nothing() -> None:
    with running_server(TINY, *FLAGS) as server:
        pids, runtime_dir = list(server.tree()), server.runtime_dir()
        server.process.kill()
        assert server.wait_exit(GONE_WITHIN_S) != 0
        expect_all_gone(pids, runtime_dir)


@pytest.mark.parametrize("draining", [False, True], ids=["serving", "draining"])
def test_a_server_that_ends_with_its_engine_tells_its_clients_first_and_leaves_nothing(draining: bool) -> None:
    body = {"model": "default", "prompt": [5, 6], "max_tokens": 200, "ignore_eos": True}
    slow = ("--load-format", "null", "--null-step-time", "0.05")
    with running_server(TINY, *FLAGS, *slow, "--api-workers", "2") as server, ThreadPoolExecutor(7) as pool:
        pids, runtime_dir = list(server.tree()), server.runtime_dir()
        whole = [pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=30) for _ in range(7)]
        with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            wait_until(lambda: server.metric("num_requests_running") == 8, 10, "eight running requests")
            if draining:
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: "stopping" in server.output(), 10, "the beginning of the end")
            os.kill(server.find("fastengine.engine --"), signal.SIGKILL)
            rest = "".join(lines)
        assert "the engine has failed" in rest
        assert [call.result().status_code for call in whole] == [503] * 7
        assert server.wait_exit(GONE_WITHIN_S) == 1
        assert "somebody killed it" in server.output()
        assert "did not end in time" not in server.output()
        expect_all_gone(pids, runtime_dir)


def test_a_worker_that_dies_at_start_ends_the_command_with_its_own_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(TINY, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] * 2}))
    with running_server(broken, *FLAGS, ready=False) as server:
        wait_until(lambda: any("--runtime-dir" in command for command in server.tree().values()), 10, "the first process")
        runtime_dir = server.runtime_dir()
        assert server.wait_exit(60) == 1
        output = server.output()
        assert "model.safetensors" in output
        assert "worker" in output
        assert not runtime_dir.exists()


def test_the_port_is_checked_before_the_model() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "fastengine.entrypoints.api_server", "--model", str(TINY), "--port", str(port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 2
    assert "--port" in result.stderr
    assert str(port) in result.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [(("--model", "/nonexistent"), "--model"), (("--model", str(TINY), "--max-model-len", "100000"), "--max-model-len"), ((), "--model")],
)
def test_a_bad_setting_is_refused_before_anything_starts(flags: tuple[str, ...], named: str) -> None:
    command = [sys.executable, "-m", "fastengine.entrypoints.api_server", "--port", str(free_port()), *flags]
    environment = {k: v for k, v in os.environ.items() if k != "FASTENGINE_MODEL_DIR"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment)
    assert result.returncode == 2
    assert named in result.stderr


def test_an_idle_server_sleeps(mortal: Server) -> None:
    """No thread polls: over three idle seconds no process of the server is woken more than a few times, or uses the processor."""
    complete(mortal)
    pids = list(mortal.tree())
    threading.Event().wait(0.5)
    before = {pid: (_switches(pid), _cpu_s(pid)) for pid in pids}
    threading.Event().wait(3.0)
    woken = {mortal.tree().get(pid, "?")[:80]: _switches(pid) - before[pid][0] for pid in pids}
    ours = {command: count for command, count in woken.items() if "launch_ranks" not in command}  # Paddle's launcher polls once a second
    assert all(count < 3 * 12 for count in ours.values()), woken
    assert sum(_cpu_s(pid) - before[pid][1] for pid in pids) <= 0.03 + 2 / os.sysconf("SC_CLK_TCK")  # 1 % of one core


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _switches(pid: int) -> int:
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def _damaged(directory: Path, what: str) -> tuple[str, ...]:
    """Break the tiny model in ``directory``; flags beside ``--model``."""
    weights, config, tokenizer = (directory / name for name in ("model.safetensors", "config.json", "tokenizer.json"))
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if what.startswith("cut"):
        weights.write_bytes(data[: int(what.removeprefix("cut "))])
    elif what == "overlap":
        same = [name for name in header if name.endswith("layernorm.weight")][:2]
        header[same[0]]["data_offsets"] = header[same[1]]["data_offsets"]
        text = json.dumps(header).encode()
        weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    elif what == "shard":
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(header, "model-00001-of-00002.safetensors")}))
    elif what == "architecture":
        config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["MixtralForCausalLM"]}))
    elif what == "no tokenizer":
        tokenizer.unlink()
    elif what == "tokenizer":
        tokenizer.write_text("{}")
    elif what == "template":
        (directory / "bad.jinja").write_text("{% if %}")
        return ("--chat-template", str(directory / "bad.jinja"))
    return {"gpu": ("--device", "gpu"), "parser": ("--tool-call-parser", "nope"), "dtype": ("--device", "cpu", "--dtype", "bfloat16")}.get(what, ())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cut 5", "--model: .*too short"),
        ("cut 100", "--model: .*truncated"),
        ("cut 5000", "--model: .*truncated"),
        ("overlap", "--model: .*overlap"),
        ("shard", "--model: .*weight files are missing"),
        ("architecture", "--model: architecture MixtralForCausalLM is not supported"),
        ("no tokenizer", "--model: .*no tokenizer files"),
        ("tokenizer", "--model: .*tokenizer.json"),
        ("template", "--chat-template: "),
        ("parser", "--tool-call-parser: "),
        ("dtype", "--dtype: "),
        pytest.param("gpu", "--device: .*without CUDA", marks=pytest.mark.skipif(not CPU_PADDLE, reason="Paddle is built with CUDA")),
    ],
)
def test_what_can_not_work_is_refused_in_one_line_before_anything_starts(
    what: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    flags = _damaged(model, what)
    monkeypatch.setattr("fastengine.entrypoints.api_server.serve", lambda config: pytest.fail("something was started"))
    assert api_server.main(["--model", str(model), "--port", str(free_port()), *flags]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(words, line)


def test_the_tiny_model_itself_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastengine.entrypoints.api_server.serve", lambda config: 0)
    assert api_server.main(["--model", str(TINY)]) == 0


def test_the_supported_architectures_are_those_of_the_workers() -> None:
    from fastengine.worker.models.registry import ARCHITECTURES as BUILDERS

    assert set(BUILDERS) == ARCHITECTURES
