"""What the worker uses of CUDA, in one place: everything else about GPUs runs anywhere, on stand-ins of this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import paddle

from fastengine import custom_ops
from fastengine.custom_ops.library import LibraryUnavailable
from fastengine.worker.block_swap import BlockCopier
from fastengine.worker.cuda_graphs import GraphFactory, paddle_graphs
from fastengine.worker.cuda_memory import DeviceMemory, PaddleDeviceMemory
from fastengine.worker.cuda_plans import PlanMaker


@dataclass(frozen=True)
class CudaRuntime:
    """``head_sizes``: those that the operators have. ``graphs`` makes the graphs of one KV cache, which share a pool of memory."""

    compute_dtypes: tuple[str, ...]
    head_sizes: tuple[int, ...]
    make_plan: PlanMaker | None
    copy_blocks: BlockCopier
    graphs: Callable[[], GraphFactory]
    memory: DeviceMemory
    synchronize: Callable[[], None]

    @classmethod
    def of_paddle(cls) -> CudaRuntime:
        """Of Paddle's current device, a GPU. Raises ValueError if there are no compiled operators for it."""
        try:
            custom_ops.require_cuda()
        except LibraryUnavailable as error:
            raise ValueError(f"--device gpu needs the CUDA operators: {error}") from None
        from fastengine.custom_ops.cuda import ops

        place = paddle.CUDAPlace(paddle.distributed.ParallelEnv().device_id)
        return cls(
            ("bfloat16", "float16"),
            ops.HEAD_SIZES,
            ops.attention_plan,
            ops.copy_blocks,
            lambda: paddle_graphs(place),
            PaddleDeviceMemory(),
            paddle.device.synchronize,
        )
