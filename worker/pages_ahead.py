"""Memory of KV blocks taken from the system in a lull, and not by the step that first writes them.

Blocks are handed out in ascending order, and each pool of a layer has its own pages::

    keys of layer 0    | used | used | ahead | ahead |  not taken  |
    values of layer 0  | used | used | ahead |       |  not taken  |      the piece that is taken next
    ...

A page that nobody has touched is zeroed by whoever touches it first, of 2 MiB at once, and on a virtual machine its host may have
to find it as well, which takes milliseconds: all threads of a step would wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastengine.worker.memory import Storage

# Of the pool, and bytes: more than that is not taken ahead of what is in use.
AHEAD_SHARE = 8
AHEAD_BYTES = 64 << 20
PIECE_BYTES = 2 << 20


class PagesAhead:
    """Of pools (on the host) whose first dimension is blocks. To be made anew when they have taken their memory again."""

    def __init__(self, pools: Sequence[Storage]):
        self._pools = pools
        bytes_per_block = sum(pool.bytes_per_row for pool in pools)
        self._num_blocks = pools[0].shape[0] if pools else 0
        self._num_ahead = min(self._num_blocks // AHEAD_SHARE, AHEAD_BYTES // bytes_per_block) if pools else 0
        self._blocks_per_piece = max(1, PIECE_BYTES // max((pool.bytes_per_row for pool in pools), default=1))
        # Taken: of every pool so many blocks, and of the first pools a piece more.
        self._num_taken = 0
        self._num_pools_further = 0

    def take(self, num_used: int) -> bool:
        """Take one piece if fewer than wanted lie ahead of the first ``num_used`` blocks; False when there is nothing to do."""
        wanted = min(self._num_blocks, num_used + self._num_ahead) if self._num_ahead else 0
        if self._num_taken >= wanted:
            return False
        end = min(self._num_blocks, self._num_taken + self._blocks_per_piece)
        if not self._pools[self._num_pools_further].take_pages(self._num_taken, end):
            self._num_ahead = 0  # the system knows no such call, or has no memory to spare
            return False
        self._num_pools_further += 1
        if self._num_pools_further == len(self._pools):
            self._num_taken, self._num_pools_further = end, 0
        return True
