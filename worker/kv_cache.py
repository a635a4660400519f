"""Paged KV memory: per layer a key and a value pool of blocks, and host blocks to swap with.

::

    key, value     [num_blocks, kv_heads, block_size, head_dim]      one pair per layer
    scales         float32 [num_blocks, kv_heads, block_size]        beside each of them if they are int8
    host           the same with num_host_blocks, on the host

What lies where inside a block is up to the operators that read it; blocks are copied whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import paddle

from fastengine import custom_ops
from fastengine.config import CacheConfig
from fastengine.custom_ops.host_blocks import HostBlocks
from fastengine.worker.block_swap import BlockCopier, StagedSwap, copy_on_device
from fastengine.worker.memory import BYTES_PER_ELEMENT, Storage, free_host_bytes
from fastengine.worker.pages_ahead import PagesAhead

CPU_SHARE_OF_FREE_MEMORY = 0.25
CPU_MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class KVShape:
    """What one rank keeps for one block of tokens."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of all layers, with their scales."""
        vectors = 2 * self.num_layers * self.num_kv_heads * self.block_size
        scale_bytes = BYTES_PER_ELEMENT["float32"] if self.has_scales else 0
        return vectors * (self.head_dim * BYTES_PER_ELEMENT[self.stored_dtype] + scale_bytes)

    @property
    def has_scales(self) -> bool:
        return self.dtype == "int8"

    @property
    def stored_dtype(self) -> str:
        """What memory knows the elements as: fp8 (e4m3) are bytes there."""
        return "uint8" if self.dtype == "fp8" else self.dtype

    def pool(self, num_blocks: int) -> tuple[int, int, int, int]:
        return (num_blocks, self.num_kv_heads, self.block_size, self.head_dim)


@dataclass(frozen=True)
class LayerCache:
    key: Storage
    value: Storage
    scales: tuple[Storage, ...] = ()  # of keys and of values

    @classmethod
    def of(cls, shape: KVShape, num_blocks: int, device: str, *, huge_pages: bool = False) -> LayerCache:
        pool = shape.pool(num_blocks)
        scales = (Storage(pool[:3], "float32", device), Storage(pool[:3], "float32", device)) if shape.has_scales else ()
        key, value = (Storage(pool, shape.stored_dtype, device, huge_pages=huge_pages) for _ in range(2))
        return cls(key, value, scales)

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    def scale_tensors(self) -> dict[str, paddle.Tensor]:
        """The scales as the operators' arguments; none where the cache has none."""
        return dict(zip(("key_scale", "value_scale"), (scale.tensor for scale in self.scales), strict=False))

    def storages(self) -> tuple[Storage, ...]:
        return (self.key, self.value, *self.scales)


@dataclass(frozen=True)
class HostMoves:
    """The ways of blocks while device and host are the same: their addresses, to be bound again whenever memory is taken."""

    out: HostBlocks
    back: HostBlocks
    inside: HostBlocks


class KVCache:
    """Owns the pools of all layers. The engine alone decides what is in which block, and hands out those never used in ascending order.

    ``copy_blocks``: the operator of a device that is not the host.
    """

    def __init__(self, shape: KVShape, num_blocks: int, num_host_blocks: int, device: str, copy_blocks: BlockCopier | None = None):
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        # A step reads blocks all over them, and would look up a page for each.
        self.layers = [LayerCache.of(shape, num_blocks, device, huge_pages=True) for _ in range(shape.num_layers)]
        self.host_layers = [LayerCache.of(shape, num_host_blocks, "cpu") for _ in range(shape.num_layers)] if num_host_blocks else []
        self._copy_blocks = copy_blocks
        self._staged = None if copy_blocks is None else StagedSwap(self._swapped_pools(), copy_blocks)
        self._moves: HostMoves | None = None
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, zeroed; on a CPU pages, of 2 MiB where the system has them, come as blocks are first written, or in a lull before."""
        for storage in self._storages():
            storage.allocate()
        self._moves = None
        self._pages_ahead = PagesAhead([] if self.layers and self.layers[0].key.device == "gpu" else list(self._device_storages()))

    def drop(self) -> None:
        """Give all of it back: whatever was cached is gone."""
        self._moves = None
        self._pages_ahead = PagesAhead([])
        for storage in self._storages():
            storage.drop()

    def take_pages_ahead(self, num_used: int) -> bool:
        """See :meth:`PagesAhead.take`; ``num_used``: no block from there on has been handed out."""
        return self._pages_ahead.take(num_used)

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self._storages())

    def swap_out(self, pairs: np.ndarray) -> None:
        """Copy blocks to the host: ``int32[n, 2]`` of (device block, host block)."""
        if self._staged is not None:
            self._staged.to_host(pairs[:, 0], pairs[:, 1])
        else:
            self._host_moves().out.copy(pairs)

    def swap_in(self, pairs: np.ndarray) -> None:
        """Copy blocks back: ``int32[n, 2]`` of (host block, device block)."""
        if self._staged is not None:
            self._staged.to_device(pairs[:, 0], pairs[:, 1])
        else:
            self._host_moves().back.copy(pairs)

    def copy(self, pairs: np.ndarray) -> None:
        """Copy blocks on the device: ``int32[n, 2]`` of (source, target), none of them both."""
        if self._copy_blocks is not None:
            copy_on_device(list(self._device_storages()), pairs, self._copy_blocks)
        else:
            self._host_moves().inside.copy(pairs)

    def _host_moves(self) -> HostMoves:
        if self._moves is None:
            swapped = [(device.rows(), host.rows()) for device, host in self._swapped_pools()]
            inside = [(storage.rows(), storage.rows()) for storage in self._device_storages()]
            back = [(host, device) for device, host in swapped]
            self._moves = HostMoves(custom_ops.copies_between(swapped), custom_ops.copies_between(back), custom_ops.copies_between(inside))
        return self._moves

    def host_block(self, block: int) -> list[memoryview]:
        """The memory of one host block as bytes: a piece for each pool of each layer, in the order of the layers."""
        rows = (slice(block, block + 1),)
        return [memoryview(storage.bits(rows)).cast("B") for layer in self.host_layers for storage in layer.storages()]

    def _swapped_pools(self) -> list[tuple[Storage, Storage]]:
        """(device's, host's) pools of all layers; none without host blocks."""
        layers = zip(self.layers, self.host_layers, strict=True) if self.host_layers else ()
        return [pair for layer, host in layers for pair in zip(layer.storages(), host.storages(), strict=True)]

    def _device_storages(self) -> Iterator[Storage]:
        return (storage for layer in self.layers for storage in layer.storages())

    def _storages(self) -> list[Storage]:
        return [storage for layer in (*self.layers, *self.host_layers) for storage in layer.storages()]


def blocks_that_fit(config: CacheConfig, shape: KVShape, gpu_budget: Callable[[], int] | None, num_ranks: int, most_useful: int) -> int:
    """Number of blocks by this rank's own measure, at most ``most_useful``.

    On a CPU the ranks share the host, so each takes its part of a quarter of the free memory (at most
    4 GiB together); on a GPU each has one of its own, and ``gpu_budget`` measures the bytes to be had there.
    ``kv_cache_memory_gib`` (per rank) overrides both.
    """
    if shape.bytes_per_block == 0:
        return most_useful
    if config.kv_cache_memory_gib is not None:
        budget = int(config.kv_cache_memory_gib * (1 << 30))
    elif gpu_budget is not None:
        budget = gpu_budget()
    else:
        budget = int(min(free_host_bytes() * CPU_SHARE_OF_FREE_MEMORY, CPU_MAX_BYTES)) // num_ranks
    return max(0, min(budget // shape.bytes_per_block, most_useful))
