"""The tensor-parallel group: one process per rank, joined by paddle.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import paddle

BACKENDS = {"cpu": "gloo", "gpu": "nccl"}


@dataclass(frozen=True)
class TensorParallel:
    """Rank and size of the group, and the three collectives the engine needs.

    ``on_stream``: they run in order with the computation, on its stream; so they can be captured in a CUDA graph.
    """

    rank: int = 0
    size: int = 1
    on_stream: bool = False

    @classmethod
    def join(cls, rank: int, size: int, device: str) -> TensorParallel:
        """Join the group that paddle.distributed.launch has set up, on ``device``; a group of one needs no set-up."""
        if size > 1:
            import paddle.distributed as dist

            # What Paddle would choose by itself follows from how it was compiled, not from the device.
            os.environ["PADDLE_DISTRI_BACKEND"] = BACKENDS[device]
            dist.init_parallel_env()
        return cls(rank, size, on_stream=device == "gpu")

    def share(self, total: int, what: str) -> int:
        """``total`` divided among the ranks; ValueError naming ``what`` if that leaves a remainder."""
        if total % self.size:
            raise ValueError(f"tensor_parallel_size {self.size} does not divide the model's {what} ({total})")
        return total // self.size

    def all_reduce(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            import paddle.distributed as dist

            dist.stream.all_reduce(tensor, use_calc_stream=self.on_stream)
        return tensor

    def all_gather_last(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """``[R, n]`` of every rank side by side: ``[R, n * size]``."""
        if self.size == 1:
            return tensor
        import paddle.distributed as dist

        parts: list[paddle.Tensor] = []
        dist.stream.all_gather(parts, tensor, use_calc_stream=self.on_stream)
        return paddle.concat(parts, axis=-1)

    def sum_uint64(self, value: int) -> int:
        """Sum of one unsigned 64-bit integer over the ranks, modulo 2**64."""
        if self.size == 1:
            return value
        tensor = paddle.to_tensor(np.array([value], dtype=np.uint64).view(np.int64))
        return self.all_reduce(tensor).numpy().view(np.uint64).item()

    def all_succeeded(self, success: bool) -> bool:
        """Whether every rank says so; the same answer everywhere."""
        return self.sum_uint64(int(success)) == self.size
