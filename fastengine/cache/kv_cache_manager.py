"""KVCacheManager: the blocks of sequences, from admission over growth to release.

Blocks of one sequence and what is known of them::

    block_ids   | hit | hit | own | own | own | own |      hits are shared, never written again
    keys        | k0  | k1  | k2  | k3  |                  of full blocks; of decoded ones from when the sequence leaves
    registered  <------- num_registered ->|                these can be hit by others

A block may be registered as soon as the step that fills it is *planned*: workers run plans in order, so
whoever finds it can only be in a later plan. (Within one plan nothing is registered: the manager's caller
registers after the plan is complete.)

With a host tier, blocks that the pool evicts are copied down and hits there are copied back. The copies are
part of the plan that is being written, in this order::

    swap_out (device -> host), swap_in (host -> device), forward

so an evicted block may be used again in the same plan, and a block swapped in may be found in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastengine.cache.block_pool import BlockPool
from fastengine.cache.host_tier import HostTier
from fastengine.cache.prefix_index import PrefixIndex, chain_keys

TOKEN_BYTES = 4
# Tokens whose KV one plan may copy in each direction: what bounds the time that copying adds to a step.
MAX_SWAPPED_TOKENS = 4096
ON_HOST = -1


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


@dataclass(frozen=True)
class Hits:
    """The part of a sequence's prefix that needs no computing: the block of each, or ON_HOST."""

    blocks: list[int]
    num_on_host: int

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def on_device(self) -> list[int]:
        return [block for block in self.blocks if block != ON_HOST] if self.num_on_host else self.blocks

    def with_at_most(self, num_on_host: int) -> Hits:
        """The longest prefix of these hits that takes at most ``num_on_host`` blocks from the host."""
        found = 0
        for i, block in enumerate(self.blocks):
            found += block == ON_HOST
            if found > num_on_host:
                return Hits(self.blocks[:i], num_on_host)
        return self


NO_HITS = Hits([], 0)


class KVCacheManager:
    """Owns the pool and the prefix index of one worker group; knows sequences only by their blocks.

    ``max_swaps``: blocks that one plan may copy in each direction between device and host.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, num_host_blocks: int = 0, max_swaps: int | None = None):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.host = HostTier(num_host_blocks)
        self.pool = BlockPool(num_blocks, self.index, self._note_evictions if num_host_blocks else None)
        self.max_swaps = max_swaps or max(1, MAX_SWAPPED_TOKENS // block_size)
        self._block_bytes = block_size * TOKEN_BYTES
        # Keys of blocks that a running sequence is about to fill, and which.
        self._being_computed: dict[bytes, SequenceBlocks] = {}
        # Of the plan that is being written: what was evicted for it; copies from the host, and what they read.
        self._evicted: list[tuple[int, bytes]] = []
        self._swap_in: list[int] = []
        self._read_by_plan: list[bytes] = []

    @property
    def num_available(self) -> int:
        return self.pool.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def identify(self, sequence: SequenceBlocks, root: bytes, tokens: bytes | memoryview) -> None:
        """Compute the keys of ``tokens`` (int32 bytes; all known ones) unless they are there already."""
        if not self.enable_prefix_caching:
            return
        if sequence.root != root:
            sequence.root, sequence.keys = root, []
        keys = sequence.keys
        done = len(keys) * self._block_bytes
        if len(tokens) - done >= self._block_bytes:
            keys += chain_keys(keys[-1] if keys else root, tokens[done:], self._block_bytes)

    def lookup(self, sequence: SequenceBlocks, num_tokens: int) -> Hits:
        """What already holds a prefix of ``num_tokens`` tokens, on the device or the host.

        The last token is always left to compute: without it there would be nothing to sample from.
        """
        limit = (num_tokens - 1) // self.block_size
        blocks = self.index.match(sequence.keys, limit)
        num_on_host = 0
        if len(self.host):
            for key in sequence.keys[len(blocks) : limit]:
                block = self.index.find(key)
                if block is None:
                    if key not in self.host:
                        break
                    block = ON_HOST
                    num_on_host += 1
                blocks.append(block)
        return Hits(blocks, num_on_host)

    def is_being_computed(self, sequence: SequenceBlocks, num_hits: int, num_tokens: int) -> bool:
        """Whether a running sequence is about to fill the very block that follows the hits."""
        return num_hits < min(len(sequence.keys), (num_tokens - 1) // self.block_size) and sequence.keys[num_hits] in self._being_computed

    def can_allocate(self, hits: Hits, num_tokens: int, keep_free: int) -> bool:
        """Whether :meth:`allocate` would leave at least ``keep_free`` blocks available."""
        on_device = hits.on_device
        need = self.blocks_for(num_tokens) - len(on_device) + self.pool.num_unowned(on_device)
        return need + keep_free <= self.pool.num_available

    def allocate(self, sequence: SequenceBlocks, hits: Hits, num_tokens: int) -> None:
        """Give ``sequence`` the hit blocks and fresh ones up to ``num_tokens`` tokens. Raises OutOfBlocks.

        Hits on the host are swapped in by the plan that is being written.
        """
        missing = self.reserve(sequence, hits, self.blocks_for(num_tokens))
        for i in missing:
            self.swap_in(sequence, i)
        sequence.num_registered = len(hits)
        for key in sequence.keys[len(hits) :]:
            self._being_computed.setdefault(key, sequence)

    # -- host tier ------------------------------------------------------------------------------

    @property
    def num_swap_ins_left(self) -> int:
        """Blocks that the plan which is being written may still bring in from the host."""
        return self.max_swaps - len(self._swap_in) // 2

    @property
    def has_swaps(self) -> bool:
        return bool(self._swap_in or self._evicted)

    def reserve(self, sequence: SequenceBlocks, hits: Hits, num_blocks: int) -> list[int]:
        """Give ``sequence`` a table of ``num_blocks`` blocks that begins with the hits. Raises OutOfBlocks.

        Returns the places in it whose content the host has: pinned there until :meth:`swap_in` or :meth:`unpin`.
        """
        assert not sequence.block_ids, "a sequence that holds blocks can't be admitted"
        missing = [i for i, block in enumerate(hits.blocks) if block == ON_HOST] if hits.num_on_host else []
        self.host.pin(sequence.keys[i] for i in missing)  # before fresh blocks evict something into their place
        self.pool.acquire(hits.on_device)
        fresh = self.pool.allocate(num_blocks - len(hits) + len(missing))
        table = [*hits.blocks, *fresh[len(missing) :]]
        for i, block in zip(missing, fresh, strict=False):
            table[i] = block
        sequence.block_ids = table
        return missing

    def swap_in(self, sequence: SequenceBlocks, place: int) -> None:
        """Bring block ``place`` of ``sequence``'s table, which the host has, in with the plan that is being written."""
        key, block = sequence.keys[place], sequence.block_ids[place]
        self._swap_in += (self.host.block_of[key], block)
        self._read_by_plan.append(key)
        self.index.register(key, block)

    def unpin(self, sequence: SequenceBlocks, places: Iterable[int]) -> None:
        """These places of the table are not brought in after all."""
        self.host.unpin([sequence.keys[i] for i in places])

    def take_swaps(self) -> tuple[list[int], list[int], list[bytes]]:
        """The plan's copies as flat pairs: (device, host, ...) to be done first, then (host, device, ...).

        Then the keys of the blocks that go to the host.
        """
        swap_out: list[int] = []
        saved: list[bytes] = []
        # Past the plan's bound evicted blocks are lost: computing them again is cheaper than a step that waits.
        # Heads of prefixes are evicted last; without them their tails would be of no use.
        for block, key in self._evicted[-self.max_swaps :]:
            host_block = self.host.claim(key)
            if host_block is not None:
                self.host.pin([key])  # no second copy into it in this plan
                saved.append(key)
                swap_out += (block, host_block)
        swap_in = self._swap_in
        self.host.unpin(saved[::-1])
        self.host.unpin(self._read_by_plan)
        self._evicted, self._swap_in, self._read_by_plan = [], [], []
        return swap_out, swap_in, saved

    def _note_evictions(self, blocks: list[int], keys: list[bytes]) -> None:
        self._evicted += zip(blocks, keys, strict=True)

    # -- computing ------------------------------------------------------------------------------

    def register(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """The KV of the first ``num_tokens`` tokens is computed by a plan that is complete."""
        full = min(num_tokens // self.block_size, len(sequence.keys))
        for i in range(sequence.num_registered, full):
            key = sequence.keys[i]
            self.index.register(key, sequence.block_ids[i])
            self._disclaim(key, sequence)
        sequence.num_registered = max(sequence.num_registered, full)

    def grow_decoding(self, sequences: Sequence[SequenceBlocks]) -> list[int]:
        """One more block for each sequence, whose table is full. Returns the new block ids. Raises OutOfBlocks."""
        blocks = self.pool.allocate(len(sequences))
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.block_ids.append(block)
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
        """Forget every block's content, the host's too. ``sequences``: those holding blocks; they stay unfindable until released.

        Returns the number of blocks that were findable.
        """
        self._being_computed.clear()
        for sequence in sequences:
            sequence.root = None
            sequence.keys = []
            sequence.num_registered = 0
        return self.pool.forget_all() + self.host.clear()

    def check(self, sequences: Iterable[SequenceBlocks], pinned: Iterable[bytes] = (), num_reserved: int = 0) -> None:
        """Raise AssertionError unless every block is accounted for by exactly its holders.

        ``pinned``: keys that the host must keep for somebody; ``num_reserved``: host blocks being filled. Not to be called while a plan is written.
        """
        assert not self.has_swaps, "copies that no plan carries"
        self.host.check(Counter(pinned), num_reserved)
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
