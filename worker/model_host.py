"""The model on this rank with all that belongs to it: spec, weights, KV cache, runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paddle

from fastengine import custom_ops
from fastengine.config import EngineConfig
from fastengine.model_files.load import weight_files
from fastengine.protocol.requests import GrammarSpec
from fastengine.protocol.steps import StepPlan, StepResult
from fastengine.text.load import load_tokenizer
from fastengine.worker.batch import PersistentBatch
from fastengine.worker.cuda_memory import StepLimits
from fastengine.worker.cuda_model import GpuModel
from fastengine.worker.cuda_runtime import CudaRuntime
from fastengine.worker.fused_executor import FusedExecutor
from fastengine.worker.fused_sampler import FusedSampler
from fastengine.worker.fused_weights import FusedWeights
from fastengine.worker.grammar import BackgroundCompiler, SlotGrammars
from fastengine.worker.kv_cache import KVCache, KVShape, blocks_that_fit
from fastengine.worker.layers.linear import Place
from fastengine.worker.loader.checkpoint import Checkpoint
from fastengine.worker.loader.dummy import DummyCheckpoint
from fastengine.worker.loader.mapped_file import Moved
from fastengine.worker.loader.weights import ModelWeights, model_spec, open_checkpoint
from fastengine.worker.model_runner import Executor, ModelExecutor, ModelRunner, NullExecutor
from fastengine.worker.models.llama import LlamaForCausalLM
from fastengine.worker.models.registry import build_model
from fastengine.worker.packed_cache import PackedCache, model_files_identity
from fastengine.worker.parallel import TensorParallel
from fastengine.worker.quantization import fused_library, kv_dtype, plan_compute
from fastengine.worker.run_cut import RunCut, no_cut
from fastengine.worker.sampler import Sampler
from fastengine.worker.sampling_table import SamplingTable

logger = logging.getLogger(__name__)

# More blocks than this many full batches of the longest sequences would only make tables larger.
MOST_FULL_BATCHES = 4
MAX_LOADING_THREADS = 4


class ModelHost:
    """Built once per process: ``load`` first, then ``init_cache``, then steps."""

    def __init__(self, config: EngineConfig, tp: TensorParallel, num_threads: int, cuda: CudaRuntime | None = None):
        """``cuda`` stands in for Paddle's own, in tests without a GPU. Raises ValueError for what the device can't do."""
        self.config = config
        self.tp = tp
        self._num_threads = num_threads
        self.device = "gpu" if cuda is not None else select_device(config.model.device)
        self.spec = model_spec(config.model.model)
        self.place = Place(compute_dtype(config.model.dtype, self.device, self.spec.torch_dtype), self.device)
        self.max_model_len = config.model.max_model_len or self.spec.max_position_embeddings
        self.is_null = config.model.load_format == "null"
        self.compute_plan = plan_compute(config, self.spec, self.device, tp.size)
        self._kv_dtype = kv_dtype(config, self.compute_plan, self.device, self.place.dtype)
        # The model in plain layers; None if it is computed by the fused step, or not at all.
        self.model: LlamaForCausalLM | None = None
        self.weights: ModelWeights | FusedWeights
        if self.compute_plan.packing is not None:
            self.weights = FusedWeights(fused_library(), self.spec, self.compute_plan.packing, self.max_model_len, num_threads)
        else:
            self.model = None if self.is_null else build_model(self.spec, self.place, tp, self.max_model_len)
            pieces = self.model.pieces() if self.model is not None else ()
            self.weights = ModelWeights(pieces, self.spec.tie_word_embeddings, min(num_threads, MAX_LOADING_THREADS))
        logger.info("%s; KV cache %s", self.compute_plan.reason, self._kv_dtype)
        self.cache: KVCache | None = None
        self.batch: PersistentBatch | None = None
        self._runner: ModelRunner | None = None
        self._gpu: GpuModel | None = None
        if self.device == "gpu" and self.model is not None:
            self._gpu = GpuModel(self.model, config.scheduler, self._limits(), self.place.dtype, cuda or CudaRuntime.of_paddle())
        elif self.device == "cpu" and config.scheduler.max_capture_batch_size is not None:
            raise ValueError("--max-capture-batch-size: there are no CUDA graphs on a CPU")
        self._compiler = BackgroundCompiler(lambda: load_tokenizer(config.model, self.spec), self.spec.eos_token_ids)

    def load(self, progress: Callable[[float], None]) -> float:
        """Take memory for the weights and fill it; returns the seconds it took.

        Raises ModelFileError or WeightsError.
        """
        started = time.monotonic()
        if not self.is_null:
            checkpoint = self._checkpoint()
            self.weights.check(checkpoint)
            if isinstance(self.weights, FusedWeights) and (cache := self._packed_cache()) is not None:
                self.weights.load(checkpoint, cache, model_files_identity(weight_files(self.config.model.model)), progress)
            else:
                self.weights.allocate()
                self.weights.fill(checkpoint, progress)
            checkpoint.close()
        progress(1.0)
        return time.monotonic() - started

    def kv_shape(self) -> KVShape:
        block_size, dtype = self.config.cache.block_size, self._kv_dtype
        if self.model is not None:
            return self.model.kv_shape(block_size, dtype)
        if self.is_null:
            return KVShape(0, 0, block_size, 0, dtype)
        return KVShape(self.spec.num_hidden_layers, self.spec.num_key_value_heads, block_size, self.spec.head_dim, dtype)

    def compiled_ops(self) -> dict[str, str]:
        """What each operator runs, for ``/version``; the fused step says which weights it computes with."""
        ops = custom_ops.compiled_ops()
        if isinstance(self.weights, FusedWeights):
            fused = self.weights.model
            ops["fused_step"] = f"{fused.instruction_set} {fused.packing.layout.name.lower()}"
        return ops

    def num_blocks_that_fit(self) -> int:
        blocks_per_sequence = -(-self.max_model_len // self.config.cache.block_size)
        most_useful = MOST_FULL_BATCHES * self.config.scheduler.max_num_seqs * blocks_per_sequence
        cache, shape, gpu = self.config.cache, self.kv_shape(), self._gpu
        gpu_budget = None if gpu is None else lambda: gpu.kv_budget(shape, cache.gpu_memory_utilization, swaps=cache.swap_space > 0)
        return blocks_that_fit(cache, shape, gpu_budget, self.tp.size, most_useful)

    def init_cache(self, num_blocks: int, num_host_blocks: int) -> None:
        """Take the KV memory and start with an empty batch; a second call replaces both."""
        self._runner = None
        self.release_graphs()
        if self.cache is not None:
            self.cache.drop()
        self.batch = PersistentBatch(
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.config.cache.block_size,
            vocab_size=self.spec.vocab_size,
        )
        grammars = None if self.is_null else SlotGrammars(self._compiler, self.spec.vocab_size)
        table = SamplingTable(self.config.scheduler.max_num_seqs, self.spec.vocab_size, self.spec.eos_token_ids, grammars)
        copy_blocks = None if self._gpu is None else self._gpu.copy_blocks
        self.cache = KVCache(self.kv_shape(), num_blocks, num_host_blocks, self.device, copy_blocks)
        self._runner = ModelRunner(self.batch, table, self._executor(self.cache, self.batch, table))

    def take_pages_ahead(self) -> bool:
        """Take a piece of the KV memory that is next to be used, in a lull; False when there is nothing to do."""
        return self.cache is not None and self.batch is not None and self.cache.take_pages_ahead(self.batch.num_blocks_reached)

    def compile_grammar(self, grammar: GrammarSpec, done: Callable[[str | None], None]) -> None:
        """Compile while steps go on, then call ``done`` (in another thread) with what is wrong with it, or None."""
        if self.is_null:
            done(None)  # refused when a sequence needs it
        else:
            self._compiler.prepare(grammar, done)

    def release_graphs(self) -> None:
        """Before weights or KV memory go away or move."""
        if self._gpu is not None:
            self._gpu.release_graphs()

    def capture_graphs(self, moved: Moved) -> None:
        """When weights and KV memory are where they will stay. ``moved`` is told of every graph."""
        if self._gpu is not None:
            self._gpu.capture_graphs(moved)

    @property
    def computes_runs(self) -> bool:
        """Whether several steps of decodes in one plan are computed with nothing between them."""
        return isinstance(self.weights, FusedWeights)

    def steps(self, plan: StepPlan, cut: RunCut) -> Iterator[StepResult]:
        """Compute ``plan``; its results as they come (see ModelRunner.steps)."""
        if self._runner is None:
            raise RuntimeError(f"step {plan.step_id} came before init_cache")
        return self._runner.steps(plan, cut)

    def step(self, plan: StepPlan) -> StepResult:
        """The result of a plan of one step."""
        (result,) = self.steps(plan, no_cut())
        return result

    def _executor(self, cache: KVCache, batch: PersistentBatch, table: SamplingTable) -> Executor:
        if isinstance(self.weights, FusedWeights):
            fused_sampler = FusedSampler(table, batch, processed_logprobs=self.config.model.logprobs_mode == "processed")
            return FusedExecutor(self.weights.model, cache, batch, table, fused_sampler)
        sampler = Sampler(table, batch, self.config.model.logprobs_mode)
        if self.model is None:
            return NullExecutor(self.config.model.null_step_time)
        steps = None if self._gpu is None else self._gpu.steps(cache, batch)
        return ModelExecutor(self.model, cache, batch, table, sampler, steps)

    def _packed_cache(self) -> PackedCache | None:
        model = self.config.model
        if not model.packed_cache or model.load_format == "dummy":
            return None
        return PackedCache(Path(model.packed_cache_dir).expanduser(), int(model.packed_cache_gib * 2**30), self._num_threads)

    def _limits(self) -> StepLimits:
        scheduler = self.config.scheduler
        return StepLimits(scheduler.max_num_seqs, scheduler.token_budget, self.max_model_len, self.config.cache.block_size)

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
