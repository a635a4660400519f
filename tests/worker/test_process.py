"""Real worker processes at the other end of the rings."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path
from subprocess import TimeoutExpired

import numpy as np
import pytest

from fastengine.protocol.requests import GrammarSpec, SamplingParams
from fastengine.protocol.steps import StepPlan, WorkerFailure
from fastengine.protocol.tokens import pack_token_ids
from fastengine.worker.model_runner import NULL_TOKEN
from tests.server import wait_until
from tests.worker.conftest import driver_of as driver_of_host
from tests.worker.conftest import loaded_host
from tests.worker.driver import Driver, Request
from tests.worker.fake_engine import FakeEngine, WorkerDied
from tests.worker.models import BLOCK_SIZE, NUM_BLOCKS, config_for, hf_config, random_weights, write_model


def driver_of(engine: FakeEngine) -> Driver:
    return Driver(engine.step, max_num_seqs=40, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


def golden_requests(golden: Path) -> tuple[list[Request], list[list[int]]]:
    data = np.load(golden / "llama" / "golden.npz")
    return [Request(data[f"prompt_{i}"].tolist(), 12) for i in range(4)], [data[f"greedy_{i}"].tolist()[:12] for i in range(4)]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output for request in requests]


def constrained_requests() -> list[Request]:
    """Free text and grammars side by side, 60 steps long."""
    grammars = [None, GrammarSpec("regex", "[a-f]{50}"), GrammarSpec("json_schema", '{"type": "array", "items": {"type": "integer"}}')]
    return [Request([5, 6, 7 + i], 60, SamplingParams(temperature=1.0, grammar=grammar), seed=i) for i, grammar in enumerate(grammars)]


def test_life_of_one_rank(golden: Path, tmp_path: Path) -> None:
    with FakeEngine(config_for(golden / "llama"), tmp_path) as engine:
        (ready,) = engine.wait_ready()
        assert ready.device == "cpu"
        assert ready.bytes_per_block == 2 * 2 * 2 * BLOCK_SIZE * 16 * 4
        assert ready.num_blocks > 1000
        signals = engine.link.signals
        assert signals.get("ready", 0) == 1
        assert signals.get("load_progress", 0) == 1000
        assert signals.get("pid", 0) == ready.pid == engine.process.pid
        assert engine.do("init_cache", num_blocks=NUM_BLOCKS) == {"bytes": NUM_BLOCKS * ready.bytes_per_block}
        requests, expected = golden_requests(golden)
        assert outputs(driver_of(engine).run(requests)) == expected
        assert signals.get("steps_done", 0) == 12
        assert signals.get("step_started_ns", 0) == 0
        assert engine.do("ping")["pid"] == ready.pid
        assert engine.command("no_such_thing")[0].error_code == 400
        before = resident_bytes(ready.pid)
        engine.do("init_cache", num_blocks=65_536)
        eighth = 65_536 // 8 * ready.bytes_per_block
        wait_until(lambda: resident_bytes(ready.pid) - before > 0.9 * eighth, 20, "memory taken in a lull")
        engine.do("shutdown")
        assert engine.process.wait(20) == 0


def test_two_ranks_equal_one(golden: Path, tmp_path: Path) -> None:
    """KV heads split over the ranks; commands answered alike by both."""
    requests, expected = golden_requests(golden)
    other = write_model(tmp_path / "other", hf_config(), random_weights(hf_config()))
    with FakeEngine(config_for(golden / "llama", cpu_threads=1), tmp_path, ranks=2) as engine:
        assert [ready.rank for ready in engine.wait_ready()] == [0, 1]
        engine.do("init_cache", num_blocks=NUM_BLOCKS)
        assert outputs(driver_of(engine).run(requests)) == expected
        # A rank that sampled otherwise than the other would compute on from another token.
        alone = driver_of_host(loaded_host(golden / "llama")).run(constrained_requests())
        assert outputs(driver_of(engine).run(constrained_requests())) == outputs(alone)
        one_rank = f"{loaded_host(golden / 'llama').weights.checksum():016x}"
        assert [reply.result["checksum"] for reply in engine.command("checksum")] == [one_rank] * 2
        replies = engine.command("load_weights", model_path=str(other))
        assert all("vocab_size is 128" in reply.error and reply.error_code == 400 for reply in replies)
        assert engine.do("load_weights", verify_checksum=one_rank)
        engine.do("sleep")
        engine.do("wakeup")
        assert engine.do("checksum")["checksum"] == one_rank
        again, _ = golden_requests(golden)
        engine.do("init_cache", num_blocks=NUM_BLOCKS)
        assert outputs(driver_of(engine).run(again)) == expected
        engine.do("ping")  # rank 1 may still be at its last step
        assert engine.link.signals.all("steps_done") == [24 + 60, 24 + 60]
        engine.do("shutdown")
        assert engine.process.wait(30) == 0


def test_two_ranks_share_a_kv_head_and_an_odd_vocabulary(tmp_path: Path) -> None:
    """Fewer KV heads than ranks, a vocabulary that does not divide, tied embeddings, biases, sampling."""
    config = hf_config(num_key_value_heads=1, vocab_size=127, tie_word_embeddings=True)
    path = write_model(tmp_path / "model", config, random_weights(config))

    def requests() -> list[Request]:
        ways = [SamplingParams(temperature=0.0, logprobs=2), SamplingParams(temperature=1.0), SamplingParams(temperature=0.0, repetition_penalty=1.3)]
        return [Request([5 + i, 6, 7 * i, 126], 10, ways[i % 3], seed=i) for i in range(6)]

    host = loaded_host(path)
    expected = driver_of_host(host).run(requests())
    with FakeEngine(config_for(path, cpu_threads=1), tmp_path, ranks=2) as engine:
        engine.wait_ready()
        engine.do("init_cache", num_blocks=NUM_BLOCKS)
        found = driver_of(engine).run(requests())
        assert outputs(found) == outputs(expected)
        assert [entry.top_ids for entry in found[0].logprobs] == [entry.top_ids for entry in expected[0].logprobs]
        assert engine.do("checksum")["checksum"] == f"{host.weights.checksum():016x}"


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = hf_config()
    weights = random_weights(config)
    del weights["model.norm.weight"]
    with FakeEngine(config_for(write_model(tmp_path / "model", config, weights)), tmp_path) as engine:
        with pytest.raises(WorkerDied) as caught:
            engine.wait_ready()
        failure = caught.value.failure
        assert isinstance(failure, WorkerFailure)
        assert (failure.rank, failure.phase, failure.step_id) == (0, "start", -1)
        assert "missing tensors: model.norm.weight" in failure.message
        assert engine.process.wait(20) == 1
        assert "Traceback" in engine.console()
        assert failure.message in engine.console()


def test_a_step_that_breaks_ends_the_rank_with_its_id(golden: Path, tmp_path: Path) -> None:
    with FakeEngine(config_for(golden / "llama", load_format="null"), tmp_path) as engine:
        engine.wait_ready()
        with pytest.raises(WorkerDied) as caught:
            engine.step(StepPlan(step_id=41, decodes=pack_token_ids([0])))
        assert engine.process.wait(20) == 1
        assert caught.value.failure is not None
        assert (caught.value.failure.phase, caught.value.failure.step_id) == ("step", 41)


def test_null_model_in_a_process_and_an_idle_rank_rests(golden: Path, tmp_path: Path) -> None:
    with FakeEngine(config_for(golden / "llama", load_format="null"), tmp_path) as engine:
        engine.wait_ready()
        engine.do("init_cache", num_blocks=NUM_BLOCKS)
        (request,) = driver_of(engine).run([Request([5, 6, 7], 20)])
        assert request.output == [NULL_TOKEN] * 20
        pid = engine.process.pid
        before = cpu_seconds(pid)
        with pytest.raises(TimeoutExpired):
            engine.process.wait(1.0)
        assert cpu_seconds(pid) - before < 0.05
        os.kill(pid, signal.SIGUSR1)
        engine.do("ping")
        assert "Current thread" in engine.console()
        os.kill(pid, signal.SIGINT)
        engine.do("ping")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
