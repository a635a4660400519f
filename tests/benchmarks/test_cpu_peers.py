"""Peers of bench_cpu.py: what their processes print becomes figures, and what goes wrong a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.cpu_peers import LlamaCpp, Load, PeerUnavailable, checked, peer_server, run_process

FAKE_BENCH = """#!{python}
import sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("loading")
for batch in arguments["-npl"].split(","):
    print('{{"pp": %s, "tg": %s, "pl": %s, "t_pp": 0.5, "t_tg": 1.5, "speed_pp": 1000.0}}' % (arguments["-npp"], arguments["-ntg"], batch))
"""


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


@pytest.mark.parametrize("command", [["/nowhere/program"], [sys.executable, "-c", "print('all is lost'); raise SystemExit(3)"]])
def test_what_goes_wrong_is_a_reason(command: list[str]) -> None:
    for run in (checked, run_process):
        with pytest.raises(PeerUnavailable, match=r"No such file|: all is lost"):
            run(command)


def test_a_server_that_ends_is_a_reason(llama: LlamaCpp) -> None:
    program = Path(llama.program("llama-server"))
    program.write_text(f"#!{sys.executable}\nraise SystemExit(7)\n")
    program.chmod(0o755)
    with pytest.raises(PeerUnavailable, match="code 7"), peer_server(llama, "/models/model.gguf", 2, 8):
        pass
