"""Commands: weights change on all ranks or none, memory goes and comes back, nothing else is disturbed."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import WorkerCommand, WorkerReply
from fastengine.text.tokenizer import Tokenizer
from fastengine.worker.commands import CommandHandlers
from fastengine.worker.memory import rss_bytes
from fastengine.worker.model_host import ModelHost
from tests.frontend.harness import ByteTokenizer
from tests.worker.conftest import driver_of, loaded_host
from tests.worker.driver import Request
from tests.worker.models import NUM_BLOCKS, hf_config, random_weights, write_model, write_safetensors

PROMPT = [5, 6, 7, 8, 9, 10]
MIB = 1 << 20


class Served:
    """A small model on disk, loaded, with its command handlers."""

    def __init__(self, directory: Path, config: dict[str, Any] | None = None):
        self.config = config or hf_config()
        self.weights = random_weights(self.config)
        self.path = write_model(directory / "served", self.config, self.weights)
        self.host: ModelHost = loaded_host(self.path)
        self.later: SimpleQueue[WorkerReply] = SimpleQueue()
        self.handlers = CommandHandlers(self.host, self.later.put)

    def send(self, name: str, **args: Any) -> WorkerReply:
        reply = self.handlers.handle(WorkerCommand(command_id=3, name=name, args=args))
        assert reply is not None
        return reply

    def do(self, name: str, **args: Any) -> dict[str, Any]:
        reply = self.send(name, **args)
        assert reply.error == ""
        assert (reply.command_id, reply.rank) == (3, 0)
        return reply.result

    def answer(self) -> list[int]:
        self.host.init_cache(NUM_BLOCKS, 0)
        return driver_of(self.host).run([Request(PROMPT, 8)])[0].output


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def test_new_weights_and_back(served: Served, tmp_path: Path) -> None:
    before, checksum = served.answer(), served.do("checksum")["checksum"]
    other = write_model(tmp_path / "other", served.config, random_weights(served.config, seed=1))
    assert served.do("load_weights", model_path=str(other))["num_tensors"] == len(served.weights)
    assert served.do("checksum")["checksum"] != checksum
    assert served.answer() == loaded_answer(other) != before
    served.do("load_weights")
    assert served.do("checksum")["checksum"] == checksum
    assert served.answer() == before


def loaded_answer(path: Path) -> list[int]:
    return driver_of(loaded_host(path)).run([Request(PROMPT, 8)])[0].output


def test_prepare_touches_nothing_and_commit_needs_it(served: Served, tmp_path: Path) -> None:
    checksum = served.do("checksum")["checksum"]
    other = write_model(tmp_path / "other", served.config, random_weights(served.config, seed=1))
    assert served.send("commit_weights").error_code == 400
    assert served.do("prepare_weights", path=str(other))["source"].startswith(str(other))
    assert served.do("checksum")["checksum"] == checksum
    served.do("commit_weights")
    assert served.do("checksum")["checksum"] != checksum
    assert "without prepare_weights" in served.send("commit_weights").error
    served.do("prepare_weights", source="checkpoint", path=None)
    served.do("discard_weights")
    assert "without prepare_weights" in served.send("commit_weights").error
    assert served.send("prepare_weights", source="tensors").error_code == 400
    assert served.send("prepare_weights", source="rumours", path="x").error_code == 400


def test_the_checksum_of_new_weights_is_verified_first(served: Served, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", served.config, random_weights(served.config, seed=1))
    before = served.do("checksum")["checksum"]
    refused = served.send("load_weights", model_path=str(other), verify_checksum="0123456789abcdef")
    assert refused.error_code == 400
    assert "expected 0123456789abcdef" in refused.error
    assert served.do("checksum")["checksum"] == before
    right = f"{loaded_host(other).weights.checksum():016x}"
    served.do("load_weights", model_path=str(other), verify_checksum=right)
    assert served.do("checksum")["checksum"] == right


def test_a_checksum_sees_one_changed_bit(served: Served) -> None:
    checksum = served.do("checksum")["checksum"]
    (piece, *_) = [p for p in served.host.weights.pieces if p.name.endswith("o_proj.weight")]
    piece.bits()[3, 5] ^= 1
    assert served.do("checksum")["checksum"] != checksum


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 5e5}, "rope_theta is 500000.0"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1"),
        ({"intermediate_size": 64}, "wrong shapes"),
    ],
)
def test_another_model_leaves_the_old_weights(served: Served, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    before = served.do("checksum")["checksum"]
    config = {**served.config, **changes}
    reply = served.send("load_weights", model_path=str(write_model(tmp_path / "other", config, random_weights(config))))
    assert reply.error_code == 400
    assert words in reply.error
    assert served.do("checksum")["checksum"] == before


def test_missing_files_leave_the_old_weights(served: Served, tmp_path: Path) -> None:
    before = served.do("checksum")["checksum"]
    assert "does not exist" in served.send("load_weights", model_path="/nonexistent/weights").error
    truncated = write_model(tmp_path / "other", served.config, served.weights)
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    assert "truncated" in served.send("load_weights", model_path=str(truncated)).error
    assert served.do("checksum")["checksum"] == before


def test_single_tensors_from_a_trainer(served: Served, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    new = served.weights[name] + 1
    write_safetensors(tmp_path / "step.safetensors", {name: new})
    assert served.do("update_tensors", path=str(tmp_path / "step.safetensors"))["num_tensors"] == 1
    updated = write_model(tmp_path / "whole", served.config, {**served.weights, name: new})
    assert served.do("checksum")["checksum"] == f"{loaded_host(updated).weights.checksum():016x}"
    write_safetensors(tmp_path / "bad.safetensors", {"model.nothing.weight": new})
    assert "does not have: model.nothing.weight" in served.send("update_tensors", path=str(tmp_path / "bad.safetensors")).error
    assert served.send("update_tensors", path=str(tmp_path / "gone.safetensors")).error_code == 400


def test_tensors_can_be_asked_to_be_whole(served: Served, tmp_path: Path) -> None:
    some, whole = str(tmp_path / "some.safetensors"), str(tmp_path / "whole.safetensors")
    left_out = "model.norm.weight"
    write_safetensors(tmp_path / "some.safetensors", {name: value for name, value in served.weights.items() if name != left_out})
    write_safetensors(tmp_path / "whole.safetensors", served.weights)
    assert not served.do("prepare_weights", source="tensors", path=some, must_be_whole=False)["is_whole"]
    assert f"missing tensors: {left_out}" in served.send("prepare_weights", source="tensors", path=some, must_be_whole=True).error
    assert served.do("prepare_weights", source="tensors", path=whole, must_be_whole=True)["is_whole"]


def test_sleep_gives_memory_back_and_wakeup_restores_it(tmp_path: Path) -> None:
    config = hf_config(vocab_size=20_000, hidden_size=512, head_dim=128)
    served = Served(tmp_path, config)
    served.weights.clear()
    write_safetensors(tmp_path / "step.safetensors", {"model.norm.weight": np.full(512, 1.5, np.float32)})
    served.do("update_tensors", path=str(tmp_path / "step.safetensors"))
    before, checksum = served.answer(), served.do("checksum")["checksum"]
    size = sum(storage.nbytes for storage in served.host.weights.storages())
    assert size > 80 * MIB
    awake = rss_bytes()
    served.do("sleep", tags=["weight", "kv_cache"])
    assert awake - rss_bytes() > 0.9 * size
    assert served.do("sleep")["asleep"] == ["kv_cache", "weight"]
    for name in ("load_weights", "update_tensors", "checksum", "prepare_weights", "commit_weights"):
        assert served.send(name, path="x").error_code == 409
    served.do("wakeup", tags=["kv_cache"])
    assert served.send("checksum").error_code == 409
    assert served.do("wakeup")["asleep"] == []
    assert served.do("checksum")["checksum"] == checksum
    assert served.answer() == before


def test_kv_memory_alone_can_sleep(served: Served) -> None:
    before = served.answer()
    assert served.host.batch is not None
    assert served.host.batch.num_blocks_reached > 0
    served.do("sleep", tags=["kv_cache"])
    assert served.host.batch.num_blocks_reached == 0, "or all that was ever used would be taken again"
    assert served.do("checksum")
    served.do("wakeup", tags=["kv_cache"])
    assert served.answer() == before
    assert "unknown memory tag" in served.send("sleep", tags=["soul"]).error


def test_log_level(served: Served) -> None:
    logger = logging.getLogger("fastengine")
    level = logger.level
    try:
        served.do("log_level", level="DEBUG")
        assert logger.level == logging.DEBUG
        assert served.send("log_level", level="LOUD").error_code == 400
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(level)


def test_profile_writes_a_trace(served: Served, tmp_path: Path) -> None:
    assert served.send("profile", action="stop").error_code == 400
    assert served.send("profile", action="start").error_code == 400
    served.do("profile", action="start", output_dir=str(tmp_path / "trace"))
    assert "already" in served.send("profile", action="start", output_dir=str(tmp_path)).error
    served.answer()
    trace = Path(served.do("profile", action="stop")["trace_file"])
    assert trace.parent == tmp_path / "trace" / "rank-0"
    assert {"prepare", "forward", "sample"} <= events(trace)
    assert any("matmul" in name for name in events(trace))


def events(trace: Path) -> set[str]:
    """Names without the durations that Paddle appends."""
    return {event["name"].split("[")[0] for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"}


def test_profiles_of_the_fused_step_show_it(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", config := hf_config(), random_weights(config))
    host = loaded_host(path, quantization="wint8", block_size=16, max_model_len=128)
    handlers = CommandHandlers(host, SimpleQueue[WorkerReply]().put)
    host.init_cache(NUM_BLOCKS, 0)
    for kind in range(2):  # a second one is a file of its own
        started = handlers.handle(WorkerCommand(command_id=1, name="profile", args={"action": "start", "output_dir": str(tmp_path)}))
        assert started is not None
        assert started.error == ""
        driver_of(host).run([Request(PROMPT, 2, SamplingParams(temperature=float(kind)))])
        stopped = handlers.handle(WorkerCommand(command_id=2, name="profile", args={"action": "stop"}))
        assert stopped is not None
        found = events(Path(stopped.result["trace_file"]))
        assert {"prepare", "fused step"} <= found
        assert ("sample" in found) == bool(kind)  # the fused step picks greedy tokens itself
    assert len(list((tmp_path / "rank-0").glob("*.json"))) == 2


@pytest.mark.parametrize("name", ["file/inside", "nul\0", "", "long" * 100])
def test_an_unwritable_profile_directory_is_the_callers_fault(served: Served, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    refused = served.send("profile", action="start", output_dir=name and str(tmp_path / name))
    assert (refused.error_code, refused.error_param) == (400, "output_dir")
    assert refused.error.startswith("output_dir: ")
    served.do("profile", action="start", output_dir=str(tmp_path))
    served.do("profile", action="stop")


def test_a_trace_that_is_not_written_is_no_success(served: Served, tmp_path: Path) -> None:
    directory = Path(served.do("profile", action="start", output_dir=str(tmp_path))["output_dir"])
    directory.rmdir()
    failed = served.send("profile", action="stop")
    assert failed.error_code == 500
    assert str(directory) in failed.error
    served.do("profile", action="start", output_dir=str(tmp_path))
    served.do("profile", action="stop")


def test_bad_arguments(served: Served) -> None:
    assert served.send("init_cache", num_blocks=0).error_code == 400
    assert served.send("load_weights", format="gguf").error_code == 400
    assert served.do("ping")["rss_bytes"] > 0


def test_grammars_compile_while_steps_go_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of events: a grammar is asked for, steps are computed, then the grammar is there."""
    gate = threading.Event()
    loaded: list[str] = []

    def load(*_: object) -> Tokenizer:
        gate.wait()
        loaded.append("tokenizer")
        return ByteTokenizer()

    monkeypatch.setattr("fastengine.worker.model_host.load_tokenizer", load)
    assert served.handlers.handle(WorkerCommand(command_id=7, name="compile_grammar", args={"kind": "regex", "source": "a+"})) is None
    assert len(served.answer()) == 8
    assert served.later.empty()
    gate.set()
    compiled = served.later.get(timeout=30)
    assert (compiled.command_id, compiled.error) == (7, "")
    served.handlers.handle(WorkerCommand(command_id=8, name="compile_grammar", args={"kind": "regex", "source": "("}))
    refused = served.later.get(timeout=30)
    assert (refused.command_id, refused.error_code) == (8, 400)
    assert "regex" in refused.error
    assert loaded == ["tokenizer"]
