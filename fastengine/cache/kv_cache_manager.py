"""KVCacheManager: the blocks of sequences, from admission over growth to release.

Blocks of one sequence and what is known of them::

    block_ids   | hit | hit | own | own | own | own |      hits are shared, never written again
    keys        | k0  | k1  | k2  | k3  | k4  |            of every full block of known tokens
    registered  <------- num_registered ->|                these can be hit by others

A block may be registered as soon as the step that fills it is *planned*: workers run plans in order, so
whoever finds it can only be in a later plan. (Within one plan nothing is registered: the manager's caller
registers after the plan is complete.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from fastengine.cache.block_pool import BlockPool
from fastengine.cache.prefix_index import KEY_BYTES, PrefixIndex, chain_keys

TOKEN_BYTES = 4


class SequenceBlocks:
    """One sequence's block table and the keys of its full blocks.

    ``root`` None: nothing of this sequence may be found by others (caching is off, or its KV is a
    mixture of two weight versions).
    """

    __slots__ = ("block_ids", "keys", "num_registered", "root")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.num_registered = 0
        self.root: bytes | None = None


class KVCacheManager:
    """Owns the pool and the prefix index of one worker group; knows sequences only by their blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, on_evict: Callable[[int, bytes], None] | None = None):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.pool = BlockPool(num_blocks, self.index, on_evict)
        self._block_bytes = block_size * TOKEN_BYTES
        # Keys of blocks that a running sequence is about to fill, and which.
        self._being_computed: dict[bytes, SequenceBlocks] = {}

    @property
    def num_available(self) -> int:
        return self.pool.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def identify(self, sequence: SequenceBlocks, root: bytes, tokens: bytes) -> None:
        """Compute the keys of ``tokens`` (int32 bytes; all known ones) unless they are there already."""
        if not self.enable_prefix_caching:
            return
        if sequence.root != root:
            sequence.root, sequence.keys = root, []
        keys = sequence.keys
        done = len(keys) * self._block_bytes
        if len(tokens) - done >= self._block_bytes:
            keys += chain_keys(keys[-1] if keys else root, tokens[done:], self._block_bytes)

    def lookup(self, sequence: SequenceBlocks, num_tokens: int) -> list[int]:
        """Blocks that already hold a prefix of ``num_tokens`` tokens.

        The last token is always left to compute: without it there would be nothing to sample from.
        """
        return self.index.match(sequence.keys, (num_tokens - 1) // self.block_size)

    def is_being_computed(self, sequence: SequenceBlocks, num_hits: int, num_tokens: int) -> bool:
        """Whether a running sequence is about to fill the very block that follows the hits."""
        return num_hits < min(len(sequence.keys), (num_tokens - 1) // self.block_size) and sequence.keys[num_hits] in self._being_computed

    def can_allocate(self, hits: Sequence[int], num_tokens: int, keep_free: int) -> bool:
        """Whether :meth:`allocate` would leave at least ``keep_free`` blocks available."""
        need = self.blocks_for(num_tokens) - len(hits) + self.pool.num_unowned(hits)
        return need + keep_free <= self.pool.num_available

    def allocate(self, sequence: SequenceBlocks, hits: Sequence[int], num_tokens: int) -> None:
        """Give ``sequence`` the hit blocks and fresh ones up to ``num_tokens`` tokens. Raises OutOfBlocks."""
        assert not sequence.block_ids, "a sequence that holds blocks can't be admitted"
        self.pool.acquire(hits)
        sequence.block_ids = [*hits, *self.pool.allocate(self.blocks_for(num_tokens) - len(hits))]
        sequence.num_registered = len(hits)
        for key in sequence.keys[len(hits) :]:
            self._being_computed.setdefault(key, sequence)

    def register(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """The KV of the first ``num_tokens`` tokens is computed by a plan that is complete."""
        full = min(num_tokens // self.block_size, len(sequence.keys))
        for i in range(sequence.num_registered, full):
            key = sequence.keys[i]
            self.index.register(key, sequence.block_ids[i])
            self._disclaim(key, sequence)
        sequence.num_registered = max(sequence.num_registered, full)

    def grow_decoding(self, sequences: Sequence[SequenceBlocks], last_blocks: bytes) -> list[int]:
        """One more block for each sequence, whose table is full; the completed block becomes findable.

        ``last_blocks``: int32[n, block_size], the tokens of each sequence's last block. Returns the new
        block ids. Raises OutOfBlocks. This is the one loop that steady decoding spends time in.
        """
        blocks = self.pool.allocate(len(sequences))
        block_of, key_of, size = self.index.block_of, self.index.key_of, self._block_bytes
        start = 0
        for sequence, block in zip(sequences, blocks, strict=True):
            block_ids, keys, root = sequence.block_ids, sequence.keys, sequence.root
            if root is not None and len(keys) < len(block_ids):
                key = blake2b((keys[-1] if keys else root) + last_blocks[start : start + size], digest_size=KEY_BYTES).digest()
                keys.append(key)
                sequence.num_registered = len(keys)
                if key not in block_of:
                    full = block_ids[-1]
                    block_of[key] = full
                    key_of[full] = key
            block_ids.append(block)
            start += size
        return blocks

    def release(self, sequence: SequenceBlocks) -> None:
        """Give up all blocks; registered ones stay findable until they are evicted. Keys are kept."""
        for key in sequence.keys[sequence.num_registered :]:
            self._disclaim(key, sequence)
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_registered = 0

    def disown(self, sequence: SequenceBlocks, num_trusted: int) -> None:
        """Beyond its first ``num_trusted`` blocks, nothing of ``sequence`` may be found any more."""
        for key in sequence.keys[sequence.num_registered :]:
            self._disclaim(key, sequence)
        for block in sequence.block_ids[num_trusted:]:
            self.pool.forget(block)
        sequence.root = None
        sequence.keys = []
        sequence.num_registered = 0

    def flush(self, sequences: Iterable[SequenceBlocks]) -> int:
        """Forget every block's content. ``sequences``: those holding blocks; they stay unfindable until released.

        Returns the number of blocks that were findable.
        """
        self._being_computed.clear()
        for sequence in sequences:
            sequence.root = None
            sequence.keys = []
            sequence.num_registered = 0
        return self.pool.forget_all()

    def check(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Raise AssertionError unless every block is accounted for by exactly its holders."""
        holders: Counter[int] = Counter()
        claims = 0
        for sequence in sequences:
            assert len(set(sequence.block_ids)) == len(sequence.block_ids), "a block stands twice in one table"
            holders.update(sequence.block_ids)
            assert sequence.num_registered <= len(sequence.block_ids)
            claims += sum(1 for owner in self._being_computed.values() if owner is sequence)
        assert claims == len(self._being_computed), "a block is being computed by nobody"
        self.pool.check(holders)

    def _disclaim(self, key: bytes, sequence: SequenceBlocks) -> None:
        if self._being_computed.get(key) is sequence:
            del self._being_computed[key]
