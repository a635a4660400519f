"""The model on this rank with all that belongs to it: spec, weights, KV cache, runner."""

from __future__ import annotations

import time
from collections.abc import Callable

import paddle

from fastengine.config import EngineConfig
from fastengine.protocol.steps import StepPlan, StepResult
from fastengine.text.load import load_tokenizer
from fastengine.worker.batch import PersistentBatch
from fastengine.worker.grammar import BackgroundCompiler, SlotGrammars
from fastengine.worker.kv_cache import KVCache, KVShape, blocks_that_fit
from fastengine.worker.layers.linear import Place
from fastengine.worker.loader.checkpoint import Checkpoint
from fastengine.worker.loader.dummy import DummyCheckpoint
from fastengine.worker.loader.weights import ModelWeights, model_spec, open_checkpoint
from fastengine.worker.model_runner import Executor, ModelExecutor, ModelRunner, NullExecutor
from fastengine.worker.models.llama import LlamaForCausalLM
from fastengine.worker.models.registry import build_model
from fastengine.worker.parallel import TensorParallel
from fastengine.worker.sampler import Sampler
from fastengine.worker.sampling_table import SamplingTable

# More blocks than this many full batches of the longest sequences would only make tables larger.
MOST_FULL_BATCHES = 4
MAX_LOADING_THREADS = 4


class ModelHost:
    """Built once per process: ``load`` first, then ``init_cache``, then steps."""

    def __init__(self, config: EngineConfig, tp: TensorParallel, num_threads: int):
        self.config = config
        self.tp = tp
        self.device = select_device(config.model.device)
        self.spec = model_spec(config.model.model)
        self.place = Place(compute_dtype(config.model.dtype, self.device, self.spec.torch_dtype), self.device)
        self.max_model_len = config.model.max_model_len or self.spec.max_position_embeddings
        self.is_null = config.model.load_format == "null"
        self.model: LlamaForCausalLM | None = None if self.is_null else build_model(self.spec, self.place, tp, self.max_model_len)
        pieces = self.model.pieces() if self.model is not None else ()
        self.weights = ModelWeights(pieces, self.spec.tie_word_embeddings, min(num_threads, MAX_LOADING_THREADS))
        self.cache: KVCache | None = None
        self.batch: PersistentBatch | None = None
        self._runner: ModelRunner | None = None
        self._compiler = BackgroundCompiler(lambda: load_tokenizer(config.model, self.spec), self.spec.eos_token_ids)

    def load(self, progress: Callable[[float], None]) -> float:
        """Take memory for the weights and fill it; returns the seconds it took.

        Raises ModelFileError or WeightsError.
        """
        started = time.monotonic()
        if not self.is_null:
            checkpoint = self._checkpoint()
            self.weights.check(checkpoint)
            self.weights.allocate()
            self.weights.fill(checkpoint, progress, show_bar=self.tp.rank == 0)
            checkpoint.close()
        progress(1.0)
        return time.monotonic() - started

    def kv_shape(self) -> KVShape:
        config = self.config.cache
        dtype = self.place.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        if self.model is None:
            return KVShape(0, 0, config.block_size, 0, dtype)
        return self.model.kv_shape(config.block_size, dtype)

    def num_blocks_that_fit(self) -> int:
        blocks_per_sequence = -(-self.max_model_len // self.config.cache.block_size)
        most_useful = MOST_FULL_BATCHES * self.config.scheduler.max_num_seqs * blocks_per_sequence
        return blocks_that_fit(self.config.cache, self.kv_shape(), self.device, self.tp.size, most_useful)

    def init_cache(self, num_blocks: int, num_host_blocks: int) -> None:
        """Take the KV memory and start with an empty batch; a second call replaces both."""
        self._runner = None
        if self.cache is not None:
            self.cache.drop()
        self.batch = PersistentBatch(
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.config.cache.block_size,
            vocab_size=self.spec.vocab_size,
        )
        grammars = None if self.model is None else SlotGrammars(self._compiler, self.spec.vocab_size)
        table = SamplingTable(self.config.scheduler.max_num_seqs, self.spec.vocab_size, self.spec.eos_token_ids, grammars)
        self.cache = KVCache(self.kv_shape(), num_blocks, num_host_blocks, self.device)
        executor: Executor = NullExecutor()
        if self.model is not None:
            sampler = Sampler(table, self.batch, self.config.model.logprobs_mode)
            executor = ModelExecutor(self.model, self.cache, self.batch, table, sampler)
        self._runner = ModelRunner(self.batch, table, executor)

    def step(self, plan: StepPlan) -> StepResult:
        if self._runner is None:
            raise RuntimeError(f"step {plan.step_id} came before init_cache")
        return self._runner.step(plan)

    def _checkpoint(self) -> Checkpoint:
        load_format = self.config.model.load_format
        if load_format == "dummy":
            return DummyCheckpoint(self.weights.expected_shapes())
        return open_checkpoint(self.config.model.model, load_format)


def select_device(wanted: str) -> str:
    """``cpu`` or ``gpu``, made Paddle's current device. Raises ValueError if Paddle can't."""
    has_gpu = paddle.device.is_compiled_with_cuda()
    device = ("gpu" if has_gpu else "cpu") if wanted == "auto" else wanted
    if device == "gpu" and not has_gpu:
        raise ValueError("--device gpu: the installed Paddle is built without CUDA; install paddlepaddle-gpu or use --device cpu")
    paddle.set_device(f"gpu:{paddle.distributed.ParallelEnv().device_id}" if device == "gpu" else "cpu")
    return device


def compute_dtype(wanted: str, device: str, checkpoint_dtype: str) -> str:
    """The type that weights and activations have. Raises ValueError for one the device can't compute in."""
    if device == "cpu":
        if wanted not in ("auto", "float32"):
            raise ValueError(f"--dtype {wanted}: Paddle has no {wanted} matrix product on a CPU; use float32")
        return "float32"
    if wanted != "auto":
        return wanted
    return checkpoint_dtype if checkpoint_dtype in ("bfloat16", "float16") else "bfloat16"
