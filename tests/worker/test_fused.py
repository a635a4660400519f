"""The fused CPU step behind the worker: the same plans, commands and checksums as the plain layers."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from fastengine.protocol.requests import SamplingParams
from fastengine.protocol.steps import WorkerCommand, WorkerReply
from fastengine.worker.commands import CommandHandlers
from fastengine.worker.model_host import ModelHost

from .conftest import driver_of, loaded_host
from .driver import Request
from .models import NUM_BLOCKS, hf_config, random_weights, write_model, write_safetensors

FLAGS: dict[str, Any] = {"block_size": 16, "max_model_len": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": True},
}


def model_at(path: Path, **changes: Any) -> tuple[Path, dict[str, np.ndarray]]:
    config = hf_config(**changes)
    tensors = random_weights(config)
    if config.get("attention_bias"):
        rng = np.random.default_rng(5)
        for layer in range(config["num_hidden_layers"]):
            for name, size in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)):
                tensors[f"model.layers.{layer}.self_attn.{name}.bias"] = rng.standard_normal(size).astype(np.float32)
    return write_model(path, config, tensors), tensors


def call(host: ModelHost, name: str, **args: Any) -> dict[str, Any]:
    return send(handlers_of(host), name, **args)


def handlers_of(host: ModelHost) -> CommandHandlers:
    return CommandHandlers(host, SimpleQueue[WorkerReply]().put)


def send(handlers: CommandHandlers, name: str, **args: Any) -> dict[str, Any]:
    reply = handlers.handle(WorkerCommand(command_id=1, name=name, args=args))
    assert reply is not None
    assert not reply.error, reply.error
    return reply.result


def answers(host: ModelHost, requests: list[Request]) -> list[list[int]]:
    host.init_cache(NUM_BLOCKS, 0)
    return [request.output for request in driver_of(host).run(requests, chunk_size=lambda: 7)]


def prompts() -> list[Request]:
    rng = np.random.default_rng(3)
    sampled = SamplingParams(temperature=1.0, top_p=0.9)
    return [Request(rng.integers(0, 128, 5 + 9 * i).tolist(), 8, SamplingParams(temperature=0.0) if i % 2 else sampled, seed=i) for i in range(8)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_are_close_to_the_plain_layers(tmp_path: Path, variant: str) -> None:
    path, _ = model_at(tmp_path / "model", **VARIANTS[variant])
    sampling = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)
    found = []
    for quantization in ("none", "wint8"):
        host = loaded_host(path, quantization=quantization, kv_cache_dtype="float32", **FLAGS)
        (request,) = driver_of(host).run([Request(list(range(40)), 1, sampling)], chunk_size=lambda: 11)
        found.append(np.array([entry.logprob for entry in request.prompt_logprobs]))
    assert len(found[0]) == 39
    assert np.sqrt(((found[0] - found[1]) ** 2).mean()) < 0.2 * found[0].std()


@pytest.mark.parametrize("quantization", ["wint8", "wint4"])
def test_answers_do_not_depend_on_the_batch(tmp_path: Path, quantization: str) -> None:
    path, _ = model_at(tmp_path / "model")
    host = loaded_host(path, quantization=quantization, **FLAGS)
    alone = [answers(host, [request])[0] for request in prompts()]
    assert answers(host, prompts()) == alone
    assert host.compiled_ops()["fused_step"].endswith({"wint8": "int8", "wint4": "int4"}[quantization])


def test_the_checksum_is_the_plain_layers(tmp_path: Path) -> None:
    path, tensors = model_at(tmp_path / "model")
    plain, fused = (loaded_host(path, quantization=quantization, **FLAGS) for quantization in ("none", "wint4"))
    assert call(fused, "checksum") == call(plain, "checksum")
    before = answers(fused, prompts())
    changed = {name: tensors[name] * 1.5 for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight")}
    write_safetensors(tmp_path / "changed.safetensors", changed)
    for host in (plain, fused):
        call(host, "update_tensors", path=str(tmp_path / "changed.safetensors"))
    assert call(fused, "checksum") == call(plain, "checksum")
    assert answers(fused, prompts()) != before
    call(fused, "load_weights", verify_checksum=f"{loaded_host(path, quantization='none', **FLAGS).weights.checksum():016x}")
    assert answers(fused, prompts()) == before


def test_sleep_and_wakeup_keep_every_bit(tmp_path: Path) -> None:
    path, _ = model_at(tmp_path / "model")
    host = loaded_host(path, quantization="wint8", **FLAGS)
    before, checksum = answers(host, prompts()), call(host, "checksum")
    handlers = handlers_of(host)
    for name in ("sleep", "wakeup"):
        send(handlers, name)
    assert answers(host, prompts()) == before
    assert call(host, "checksum") == checksum


def test_blocks_of_an_int8_cache_swap_with_their_scales(tmp_path: Path) -> None:
    path, _ = model_at(tmp_path / "model")
    host = loaded_host(path, num_blocks=8, num_host_blocks=4, quantization="wint8", **FLAGS)
    cache = host.cache
    assert cache is not None
    assert cache.nbytes == 12 * cache.shape.bytes_per_block
    rng = np.random.default_rng(0)
    storages = [storage for layer in cache.layers for storage in layer.storages()]
    for storage in storages:
        storage.write((slice(None),), rng.integers(0, 100, storage.shape).astype(np.float32))
    before = [storage.bits((slice(3, 5),)).copy() for storage in storages]
    cache.swap_out(np.array([[3, 1], [4, 2]], np.int32))
    cache.swap_in(np.array([[1, 6], [2, 7]], np.int32))
    for storage, want in zip(storages, before, strict=True):
        np.testing.assert_array_equal(storage.bits((slice(6, 8),)), want)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"quantization": "wint8", "block_size": 8}, "multiple of 16"),
        ({"quantization": "none", "kv_cache_dtype": "int8"}, "needs the fused CPU step"),
        ({"quantization": "wint4", "load_format": "null"}, "null model"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    path, _ = model_at(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        loaded_host(path, **{**FLAGS, **flags})
