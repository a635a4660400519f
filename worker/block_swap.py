"""KV blocks of a GPU: copied there, and swapped with the host's through a staging buffer on the GPU.

::

    pools of all layers  -- one kernel -->  staging [num_pools, n, words]  -- one copy -->  host blocks

A block lies in pieces, one in each pool of each layer. One kernel gathers (or scatters) the pieces of many
blocks and one copy over the bus moves them, in place of one of each for every pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import paddle

from fastengine.worker.memory import Storage

# What a swap takes of the device's memory at a time.
STAGING_BYTES = 32 << 20
WORD = np.dtype(np.int32)

# (sources, targets, source_ids, target_ids): targets[p][target_ids[i]] = sources[p][source_ids[i]], ids int32 on the device.
BlockCopier = Callable[[Sequence[paddle.Tensor], Sequence[paddle.Tensor], paddle.Tensor, paddle.Tensor], None]
Pools = list[tuple[Storage, Storage]]


class StagedSwap:
    """Moves blocks between pairs of pools, one on the device and one on the host, of one shape and dtype each."""

    def __init__(self, pools: Pools, copy_blocks: BlockCopier):
        self._copy_blocks = copy_blocks
        self._groups = _by_block_size(pools)

    def to_host(self, device_ids: np.ndarray, host_ids: np.ndarray) -> None:
        """Copy blocks ``device_ids`` to ``host_ids`` (int32 [n] each); they are there on return."""
        for block_bytes, pools, part in self._parts(device_ids.size):
            count = device_ids[part].size
            staging = paddle.empty([len(pools) * count, block_bytes // WORD.itemsize], dtype="int32")
            self._copy_blocks(_tensors(pools), _split(staging, count), paddle.to_tensor(device_ids[part]), _first(count))
            pieces = staging.numpy().view(np.uint8).reshape(len(pools), count, block_bytes)
            for (_, host), piece in zip(pools, pieces, strict=True):
                host.rows()[host_ids[part]] = piece

    def to_device(self, host_ids: np.ndarray, device_ids: np.ndarray) -> None:
        """Copy blocks ``host_ids`` to ``device_ids`` (int32 [n] each); what is launched later sees them there."""
        for block_bytes, pools, part in self._parts(device_ids.size):
            count = device_ids[part].size
            pieces = np.concatenate([host.rows()[host_ids[part]] for _, host in pools])
            staging = paddle.to_tensor(pieces.view(WORD).reshape(-1, block_bytes // WORD.itemsize))
            self._copy_blocks(_split(staging, count), _tensors(pools), _first(count), paddle.to_tensor(device_ids[part]))

    def _parts(self, count: int) -> Iterator[tuple[int, Pools, slice]]:
        """(bytes of a piece, pools, which of ``count`` blocks) for every round through the staging buffer."""
        for block_bytes, pools in self._groups:
            at_a_time = max(1, STAGING_BYTES // (block_bytes * len(pools)))
            for first in range(0, count, at_a_time):
                yield block_bytes, pools, slice(first, first + at_a_time)


def copy_on_device(storages: Sequence[Storage], pairs: np.ndarray, copy_blocks: BlockCopier) -> None:
    """Copy blocks in each of ``storages``: int32 ``[n, 2]`` of (source, target), none of them both, since all are copied at once."""
    sources, targets = paddle.to_tensor(pairs[:, 0].copy()), paddle.to_tensor(pairs[:, 1].copy())
    for _block_bytes, pools in _by_block_size([(storage, storage) for storage in storages]):
        tensors = _tensors(pools)
        copy_blocks(tensors, tensors, sources, targets)


def _by_block_size(pools: Pools) -> list[tuple[int, Pools]]:
    """The operator copies blocks of one size at a time."""
    sizes: dict[int, Pools] = {}
    for device, host in pools:
        sizes.setdefault(host.bytes_per_row, []).append((device, host))
    return list(sizes.items())


def _tensors(pools: Pools) -> list[paddle.Tensor]:
    tensors = [device.tensor for device, _ in pools]
    assert all(tensor is not None for tensor in tensors), "a swap with dropped memory"
    return tensors


def _split(staging: paddle.Tensor, count: int) -> list[paddle.Tensor]:
    """Each pool's ``count`` rows of the buffer, in place: such a slice shares its memory."""
    return [staging._slice(first, first + count) for first in range(0, staging.shape[0], count)]


def _first(count: int) -> paddle.Tensor:
    return paddle.arange(count, dtype="int32")
