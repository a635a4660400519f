"""A model on a GPU: what runs its steps there, how much memory they leave, and its captured decode steps."""

from __future__ import annotations

from fastengine.config import SchedulerConfig
from fastengine.worker.batch import PersistentBatch
from fastengine.worker.block_swap import STAGING_BYTES
from fastengine.worker.cuda_forward import CudaSteps, ForwardPass
from fastengine.worker.cuda_graphs import LARGEST_BY_DEFAULT, DecodeGraphs, capture_sizes
from fastengine.worker.cuda_memory import StepLimits, measure_kv_budget
from fastengine.worker.cuda_runtime import CudaRuntime
from fastengine.worker.kv_cache import KVCache, KVShape
from fastengine.worker.loader.mapped_file import Moved
from fastengine.worker.models.llama import LlamaForCausalLM


class GpuModel:
    """``kv_budget`` once the weights are there, then ``steps`` for each KV cache."""

    def __init__(self, model: LlamaForCausalLM, config: SchedulerConfig, limits: StepLimits, dtype: str, cuda: CudaRuntime):
        """Raises ValueError for a compute type or a head size that the operators don't have."""
        if dtype not in cuda.compute_dtypes:
            raise ValueError(f"--dtype {dtype}: the CUDA operators compute in {' or '.join(cuda.compute_dtypes)}")
        if model.spec.head_dim not in cuda.head_sizes:
            raise ValueError(f"the model has heads of {model.spec.head_dim}: the CUDA operators have {', '.join(map(str, cuda.head_sizes))}")
        self.copy_blocks = cuda.copy_blocks
        self._limits = limits
        self._cuda = cuda
        self._forward = ForwardPass(model, cuda.make_plan)
        self._graphs: DecodeGraphs | None = None
        largest = config.max_capture_batch_size
        self.capture_sizes = capture_sizes(min(config.max_num_seqs, LARGEST_BY_DEFAULT if largest is None else largest))

    def kv_budget(self, shape: KVShape, utilization: float, *, swaps: bool) -> int:
        """Bytes that the KV cache may take beside all else. ``swaps``: room is left for the staging buffer."""
        budget = measure_kv_budget(self._forward, shape, self._limits, utilization, self.capture_sizes, self._cuda.memory, "gpu")
        return budget - STAGING_BYTES if swaps else budget

    def steps(self, cache: KVCache, batch: PersistentBatch) -> CudaSteps:
        """The steps over ``cache``, decodes captured; those over an earlier cache are given up."""
        self.release_graphs()
        self._graphs = None
        if self.capture_sizes:
            self._graphs = DecodeGraphs(
                lambda tensors: self._forward.of_tensors(tensors, 1, cache),
                self.capture_sizes,
                self._limits.table_width,
                self._cuda.graphs(),
                self._cuda.synchronize,
            )
        self.capture_graphs()
        return CudaSteps(self._forward, cache, batch, self._limits.max_model_len, self._graphs)

    def release_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.release()

    def capture_graphs(self, moved: Moved | None = None) -> None:
        if self._graphs is not None:
            self._graphs.capture(moved)
