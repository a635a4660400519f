"""The worker's GPU path over the very CUDA operators, run by the host shim: Paddle's own products stand in for cuBLAS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fastengine import custom_ops
from fastengine.custom_ops.cuda import build, library, ops
from fastengine.custom_ops.library import LibraryUnavailable
from fastengine.protocol.requests import SamplingParams
from fastengine.worker import block_swap, parallel, sampler
from fastengine.worker.cuda_runtime import CudaRuntime
from fastengine.worker.kv_cache import KVCache, KVShape
from fastengine.worker.memory import Storage
from fastengine.worker.model_host import ModelHost
from fastengine.worker.parallel import TensorParallel
from tests.worker.conftest import driver_of, loaded_host
from tests.worker.cuda_fakes import FakeDevice, cuda_host
from tests.worker.driver import Request
from tests.worker.models import NUM_BLOCKS, config_for, hf_config, random_weights, write_model
from tests.worker.test_golden import full_logits

pytestmark = pytest.mark.timeout(600)  # the first run compiles the binding
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 11,
    },
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture
def cuda_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """All operators are the CUDA ones, on the host shim; bfloat16 products, which a CPU's Paddle lacks, go through float32."""
    library.load_whatever_paddle(build.build_shim_paddle_library())
    matmul = paddle.matmul

    def product(x: paddle.Tensor, y: paddle.Tensor, **options: Any) -> paddle.Tensor:
        return matmul(x.astype("float32"), y.astype("float32"), **options).astype(x.dtype)

    monkeypatch.setattr(paddle, "matmul", product)
    monkeypatch.setattr(custom_ops, "_backend_of", lambda tensor: ops)


def model_path(tmp_path: Path, kind: str) -> Path:
    """Weights that bfloat16 holds exactly: what differs from float32 then is the computation."""
    config = hf_config(**CHANGES[kind])
    weights = {name: (w.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, w in random_weights(config).items()}
    return write_model(tmp_path / kind, config, weights)


@pytest.mark.parametrize(
    ("kind", "cache", "tolerance"),
    [("llama", "auto", 0.03), ("llama", "int8", 0.06), ("llama", "fp8", 0.15), ("window", "auto", 0.03)],
)
def test_tokens_are_as_likely_as_the_best(tmp_path: Path, cuda_operators: None, kind: str, cache: str, tolerance: float) -> None:
    """Prefill in chunks, mixed steps, captured decodes with plans and padding: each token is nearly the float32 model's first choice."""
    path, device = model_path(tmp_path, kind), FakeDevice()
    host = cuda_host(
        path, device, dtype="bfloat16", dtypes=("bfloat16",), head_sizes=ops.HEAD_SIZES, make_plan=ops.attention_plan, kv_cache_dtype=cache,
        max_num_seqs=4, max_capture_batch_size=4,
    )  # fmt: skip
    host.init_cache(NUM_BLOCKS, 0)
    rng = np.random.default_rng(0)
    requests = [Request(rng.integers(3, 128, length).tolist(), 6, arrival_step=step) for length, step in ((19, 0), (1, 1), (30, 2))]
    driver_of(host).run(requests, lambda: 13)
    assert sum(graph.replays for graph in device.graphs) > 0
    with pytest.MonkeyPatch.context() as undone:
        undone.setattr(custom_ops, "_backend_of", lambda tensor: custom_ops._backend)
        wide = loaded_host(path)
        for request in requests:
            assert request.error is None
            logits = full_logits(wide, request.prompt + request.output)[len(request.prompt) - 1 : -1]
            chosen = logits[np.arange(len(request.output)), request.output]
            assert (logits.max(axis=1) - chosen <= tolerance * np.abs(logits).max()).all()


def test_sampling_settings_reach_the_operators(tmp_path: Path, cuda_operators: None) -> None:
    """Biases without penalties (packed arrays of no elements), filters, log-probabilities."""
    host = cuda_host(
        model_path(tmp_path, "llama"), FakeDevice(), dtype="bfloat16", dtypes=("bfloat16",), head_sizes=ops.HEAD_SIZES,
        make_plan=ops.attention_plan, max_num_seqs=4,
    )  # fmt: skip
    host.init_cache(NUM_BLOCKS, 0)
    biased = Request([5, 6, 9], 4, SamplingParams(temperature=0.0, logit_bias={7: 100.0}, logprobs=2))
    driver_of(host).run([biased])
    assert biased.output == [7] * 4
    assert [len(entry.top_ids) for entry in biased.logprobs] == [2] * 4
    greedy, narrow = Request([5, 6, 9], 4), Request([5, 6, 9], 4, SamplingParams(temperature=0.9, top_k=1))
    penalized = Request([5, 6, 9], 4, SamplingParams(temperature=0.0, repetition_penalty=100.0, presence_penalty=2.0, frequency_penalty=2.0))
    driver_of(host).run([greedy, narrow, penalized])
    assert narrow.output == greedy.output
    assert len(set(penalized.output)) == 4


def test_constrained_rows_are_masked_by_the_operator(cuda_operators: None, rng: np.random.Generator) -> None:
    logits = rng.normal(size=(3, 70)).astype(np.float32)
    allowed = rng.random((2, 70)) < 0.5
    masked = paddle.to_tensor(logits)
    sampler.apply_bitmask(masked, paddle.to_tensor(sampler.bitmask(allowed)), paddle.to_tensor(np.array([2, 0], np.int32)))
    expected = logits.copy()
    expected[[2, 0]] = np.where(allowed, logits[[2, 0]], -np.inf)
    np.testing.assert_array_equal(masked.numpy(), expected)


# ---- memory on the device: the same code without a mapping behind it ----------------------------------------


@pytest.mark.parametrize("blocks_at_a_time", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_blocks_are_swapped_out_and_in(
    dtype: str, blocks_at_a_time: int, cuda_operators: None, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    shape = KVShape(2, 2, 8, 16, dtype)
    monkeypatch.setattr(block_swap, "STAGING_BYTES", shape.bytes_per_block * blocks_at_a_time)
    copies = []

    def copy_blocks(*args: Any) -> None:
        copies.append(len(args[0]))
        ops.copy_blocks(*args)

    cache = KVCache(shape, 8, 6, "gpu", copy_blocks)
    storages = [storage for layer in cache.layers for storage in layer.storages()]
    contents = []
    for storage in storages:
        values = rng.integers(1, 100, storage.shape)
        storage.tensor[...] = paddle.to_tensor(values.astype(np.float32)).astype(storage.tensor.dtype)
        contents.append(storage.tensor.astype("float32").numpy())
    cache.swap_out(np.array([[5, 0], [2, 3], [7, 5]], np.int32))
    for storage in storages:
        storage.tensor[...] = paddle.zeros(storage.shape, storage.dtype)
    cache.swap_in(np.array([[3, 1], [0, 4], [5, 0]], np.int32))
    for storage, before in zip(storages, contents, strict=True):
        expected = np.zeros_like(before)
        expected[[1, 4, 0]] = before[[2, 5, 7]]
        np.testing.assert_array_equal(storage.tensor.astype("float32").numpy(), expected)
    if blocks_at_a_time == 8:  # keys and values of both layers at once, and the scales, which are smaller
        assert copies == ([4, 4] if dtype == "int8" else [4]) * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_blocks_are_copied_on_the_device(dtype: str, cuda_operators: None, rng: np.random.Generator) -> None:
    cache = KVCache(KVShape(2, 2, 8, 16, dtype), 8, 0, "gpu", ops.copy_blocks)
    storages = [storage for layer in cache.layers for storage in layer.storages()]
    for storage in storages:
        storage.tensor[...] = paddle.to_tensor(rng.integers(1, 100, storage.shape).astype(np.float32)).astype(storage.tensor.dtype)
    before = [storage.tensor.astype("float32").numpy() for storage in storages]
    cache.copy(np.array([[5, 0], [2, 3], [5, 7]], np.int32))
    for storage, old in zip(storages, before, strict=True):
        np.testing.assert_array_equal(storage.tensor.astype("float32").numpy(), old[[5, 1, 2, 2, 4, 5, 6, 5]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_on_the_device_survive_a_night(dtype: str, tmp_path: Path, rng: np.random.Generator) -> None:
    storage = Storage((3, 5), dtype, "gpu")
    storage.allocate()
    storage.write((slice(1, 3), slice(None)), rng.normal(size=(2, 5)).astype(np.float32))
    before = storage.tensor.astype("float32").numpy()
    assert before[1:].all()
    with (tmp_path / "spilled").open("w+b") as file:
        storage.save(file.fileno(), lambda: None)
        storage.drop()
        storage.allocate()
        assert storage.restore(file.fileno(), 0, lambda: None) == storage.nbytes
    np.testing.assert_array_equal(storage.tensor.astype("float32").numpy(), before)


# ---- what is refused at the start ----------------------------------------------------------------------------


def test_a_paddle_without_cuda_or_operators_is_told_at_once(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--device gpu: the installed Paddle is built without CUDA"):
        ModelHost(config_for(golden / "llama", device="gpu"), TensorParallel(), 1)
    monkeypatch.setattr(custom_ops, "require_cuda", lambda: (_ for _ in ()).throw(LibraryUnavailable("libfastengine_cuda.so was not built")))
    with pytest.raises(ValueError, match=r"--device gpu needs the CUDA operators: libfastengine_cuda.so was not built"):
        CudaRuntime.of_paddle()


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        ({}, {"dtypes": ("bfloat16", "float16")}, "--dtype float32: the CUDA operators compute in bfloat16 or float16"),
        ({}, {"head_sizes": (64, 128)}, "the model has heads of 16: the CUDA operators have 64, 128"),
        ({"kv_cache_dtype": "float16"}, {}, "--kv-cache-dtype float16: with float32 on a GPU there are float32, int8, fp8"),
        ({"quantization": "wint4"}, {}, "--quantization wint4: the fused step runs on a CPU only"),
    ],
)
def test_what_the_operators_lack_is_refused(golden: Path, flags: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cuda_host(golden / "llama", FakeDevice(), **flags, **options)


@pytest.mark.parametrize("cache", ["float16", "fp8"])
def test_caches_of_gpus_are_refused_on_a_cpu(golden: Path, cache: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-cache-dtype {cache}: with float32 on a CPU there are float32, bfloat16"):
        loaded_host(golden / "llama", kv_cache_dtype=cache)


def test_graphs_are_refused_on_a_cpu(golden: Path) -> None:
    with pytest.raises(ValueError, match="--max-capture-batch-size: there are no CUDA graphs on a CPU"):
        loaded_host(golden / "llama", max_capture_batch_size=4)


# ---- tensor parallelism --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("gpu", "nccl")])
def test_the_device_chooses_the_backend_and_the_stream(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs collectives run on the computation's stream, where a graph captures them."""
    dist, calls = paddle.distributed, []
    monkeypatch.setenv("PADDLE_DISTRI_BACKEND", "auto")
    monkeypatch.setattr(dist, "init_parallel_env", lambda: calls.append(("init", parallel.os.environ["PADDLE_DISTRI_BACKEND"])))
    monkeypatch.setattr(dist.stream, "all_reduce", lambda tensor, use_calc_stream: calls.append(("reduce", use_calc_stream)))

    def gather(parts: list[paddle.Tensor], tensor: paddle.Tensor, use_calc_stream: bool) -> None:
        parts += [tensor, 2 * tensor]
        calls.append(("gather", use_calc_stream))

    monkeypatch.setattr(dist.stream, "all_gather", gather)
    tp = TensorParallel.join(1, 2, device)
    tp.all_reduce(paddle.ones([1]))
    assert tp.all_gather_last(paddle.ones([1, 1])).tolist() == [[1.0, 2.0]]
    assert calls == [("init", backend), ("reduce", device == "gpu"), ("gather", device == "gpu")]
