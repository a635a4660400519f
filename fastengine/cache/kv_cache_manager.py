"""KVCacheManager: the blocks of sequences, from admission over growth to release.

Blocks of one sequence and what is known of them::

    block_ids   | hit | hit | own | own | own | own |      hits are shared, never written again
    keys        | k0  | k1  | k2  | k3  | part |           of full blocks; of decoded ones from when the sequence leaves
    registered  <------- num_registered ->|                these can be hit by others
    copied                  |--|                           what another block begins with, too

Where the hits end, another block may begin with the same tokens as the first own one. Then it is copied there by the
plan that starts the sequence, and computing begins behind what both share. The end of a prompt, and of a sequence that
leaves, is registered as a part of a block for that. What is copied from can't be evicted before the plan is complete.

A block may be registered as soon as the step that fills it is *planned*: workers run plans in order, so
whoever finds it can only be in a later plan. (Within one plan nothing is registered: the manager's caller
registers after the plan is complete.)

With a host tier, blocks that the pool evicts are copied down and hits there are copied back. The copies are
part of the plan that is being written, in this order::

    swap_out (device -> host), swap_in (host -> device), copies (device -> device), forward

so an evicted block may be used again in the same plan, and a block swapped in may be found in it, also to be copied.
Parts of blocks are not kept on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastengine.cache.block_pool import BlockPool
from fastengine.cache.branches import NO_BLOCK, Tokens
from fastengine.cache.host_tier import HostTier
from fastengine.cache.prefix_index import PrefixIndex, chain_keys, is_whole, part_key

TOKEN_BYTES = 4
# A block is copied when at least 1 / this of it need not be computed then. (Copying costs less than computing one token.)
LEAST_SHARE = 8
# Tokens whose KV one plan may copy in each direction: what bounds the time that copying adds to a step.
MAX_SWAPPED_TOKENS = 4096
ON_HOST = -1


class SequenceBlocks:
    """One sequence's block table and the keys of its full blocks.

    ``root`` None: nothing of this sequence may be found by others (caching is off, or its KV is a
    mixture of two weight versions).
    """

    __slots__ = ("block_ids", "keys", "num_identified", "num_registered", "part", "root")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.num_registered = 0
        self.root: bytes | None = None
        # The first num_identified tokens end inside of a block; None: with too little of it to be of use.
        self.num_identified = 0
        self.part: bytes | None = None

    def forget_keys(self) -> None:
        """Nothing of this sequence is to be found by others, until it is identified again."""
        self.root, self.keys, self.part = None, [], None
        self.num_registered = 0


@dataclass(frozen=True)
class Hits:
    """The part of a sequence's prefix that needs no computing: the block of each, or ON_HOST.

    Then the first ``num_copied`` tokens of block ``source``, which is to be copied.
    """

    blocks: list[int]
    num_on_host: int
    source: int = NO_BLOCK
    num_copied: int = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def num_tokens(self, block_size: int) -> int:
        return len(self.blocks) * block_size + self.num_copied

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
        self.index = PrefixIndex(num_blocks, block_size)
        self.host = HostTier(num_host_blocks)
        self.pool = BlockPool(num_blocks, self.index, self._note_evictions if num_host_blocks else None)
        self.max_swaps = max_swaps or max(1, MAX_SWAPPED_TOKENS // block_size)
        self._block_bytes = block_size * TOKEN_BYTES
        self._least_shared = max(1, block_size // LEAST_SHARE)
        # Keys of blocks that a running sequence is about to fill, and which.
        self._being_computed: dict[bytes, SequenceBlocks] = {}
        # Of the plan that is being written: what was evicted for it; copies from the host, and what they read; copies on the device.
        self._evicted: list[tuple[int, bytes]] = []
        self._swap_in: list[int] = []
        self._read_by_plan: list[bytes] = []
        self._copies: list[int] = []

    @property
    def num_available(self) -> int:
        return self.pool.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def identify(self, sequence: SequenceBlocks, root: bytes, tokens: bytes | memoryview) -> None:
        """Compute the keys of ``tokens`` (int32 bytes; all known ones) unless they are there already."""
        num_tokens = len(tokens) // TOKEN_BYTES
        if not self.enable_prefix_caching or (sequence.root == root and sequence.num_identified == num_tokens):
            return
        if sequence.root != root:
            sequence.root, sequence.keys = root, []
        keys = sequence.keys
        done = len(keys) * self._block_bytes
        if len(tokens) - done >= self._block_bytes:
            keys += chain_keys(keys[-1] if keys else root, tokens[done:], self._block_bytes)
        done = len(keys) * self._block_bytes
        is_of_use = num_tokens - len(keys) * self.block_size >= self._least_shared
        sequence.part = part_key(keys[-1] if keys else root, tokens[done:]) if is_of_use else None
        sequence.num_identified = num_tokens

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

    def with_copy(self, sequence: SequenceBlocks, hits: Hits, tokens: Tokens, keep_free: int) -> Hits:
        """``hits`` and the block that goes on with most of the other ``tokens`` (all known ones), if it is worth a copy.

        It must allow to allocate with ``keep_free`` blocks left: until the plan is complete it can't be evicted. Again
        the last token is left to compute.
        """
        parent = sequence.keys[len(hits) - 1] if len(hits) else sequence.root
        wanted = tokens[len(hits) * self.block_size : -1]
        if parent is None or len(wanted) < self._least_shared:
            return hits
        source, num_copied = self.index.branches.longest(parent, wanted)
        if num_copied < self._least_shared:
            return hits
        extended = Hits(hits.blocks, hits.num_on_host, source, num_copied)
        return extended if self.can_allocate(extended, len(tokens), keep_free) else hits

    def is_being_computed(self, sequence: SequenceBlocks, num_hits: int) -> bool:
        """Whether a running sequence is about to fill a block with the very tokens that follow the hits."""
        key = sequence.keys[num_hits] if num_hits < len(sequence.keys) else sequence.part
        return key in self._being_computed

    def can_allocate(self, hits: Hits, num_tokens: int, keep_free: int) -> bool:
        """Whether :meth:`allocate` would leave at least ``keep_free`` blocks available."""
        on_device = hits.on_device
        need = self.blocks_for(num_tokens) - len(on_device) + self.pool.num_unowned(on_device)
        if hits.num_copied:
            need += self.pool.num_unowned([hits.source])
        return need + keep_free <= self.pool.num_available

    def allocate(self, sequence: SequenceBlocks, hits: Hits, tokens: Tokens) -> None:
        """Give ``sequence`` the hit blocks and fresh ones for all of its ``tokens``. Raises OutOfBlocks.

        Hits on the host are swapped in by the plan that is being written, which also copies what is to be copied.
        """
        if hits.num_copied:
            self.pool.acquire([hits.source])  # until take_copies()
        missing = self.reserve(sequence, hits, self.blocks_for(len(tokens)))
        for i in missing:
            self.swap_in(sequence, i, tokens)
        if hits.num_copied:
            self._copies += (hits.source, sequence.block_ids[len(hits)])
        sequence.num_registered = len(hits)
        for key in sequence.keys[len(hits) :]:
            self._being_computed.setdefault(key, sequence)
        if sequence.part is not None:
            self._being_computed.setdefault(sequence.part, sequence)

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def take_copies(self) -> list[int]:
        """The plan's copies on the device as flat pairs: (block, block that becomes the same, ...)."""
        copies, self._copies = self._copies, []
        self.pool.release(copies[::2])
        return copies

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

    def swap_in(self, sequence: SequenceBlocks, place: int, tokens: Tokens) -> None:
        """Bring block ``place`` of the table of ``sequence``, of these ``tokens``, in with the plan that is being written: the host has it."""
        key, block = sequence.keys[place], sequence.block_ids[place]
        self._swap_in += (self.host.block_of[key], block)
        self._read_by_plan.append(key)
        self._register(sequence, place, place + 1, tokens)

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
        self._evicted += [(block, key) for block, key in zip(blocks, keys, strict=True) if is_whole(key)]

    # -- computing ------------------------------------------------------------------------------

    def register(self, sequence: SequenceBlocks, tokens: Tokens) -> None:
        """The KV of the first ``tokens`` of ``sequence`` is computed by a plan that is complete."""
        full = min(len(tokens) // self.block_size, len(sequence.keys))
        if sequence.num_registered < full:
            self._register(sequence, sequence.num_registered, full, tokens)
            for key in sequence.keys[sequence.num_registered : full]:
                self._disclaim(key, sequence)
            sequence.num_registered = full
        if sequence.part is not None and sequence.num_identified == len(tokens):
            block, parent = sequence.block_ids[full], sequence.keys[-1] if full else sequence.root
            assert parent is not None
            self.index.register(sequence.part, block, parent)
            self.index.branches.fill([block], tokens[full * self.block_size :])
            self._disclaim(sequence.part, sequence)
            sequence.part = None

    def _register(self, sequence: SequenceBlocks, first: int, end: int, tokens: Tokens) -> None:
        """Let the full blocks ``first`` to ``end - 1`` of the table be found."""
        blocks, keys = sequence.block_ids[first:end], sequence.keys[first:end]
        parent = sequence.keys[first - 1] if first else sequence.root
        assert parent is not None
        for key, block in zip(keys, blocks, strict=True):
            self.index.register(key, block, parent)
            parent = key
        self.index.branches.fill(blocks, tokens[first * self.block_size : end * self.block_size])

    def grow_decoding(self, sequences: Sequence[SequenceBlocks]) -> list[int]:
        """One more block for each sequence, whose table is full. Returns the new block ids. Raises OutOfBlocks."""
        blocks = self.pool.allocate(len(sequences))
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.block_ids.append(block)
        return blocks

    def release(self, sequence: SequenceBlocks) -> None:
        """Give up all blocks; registered ones stay findable until they are evicted. Keys are kept."""
        self._disclaim_all(sequence)
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_registered = 0
        sequence.num_identified, sequence.part = 0, None

    def disown(self, sequence: SequenceBlocks, num_trusted: int) -> None:
        """Beyond its first ``num_trusted`` blocks, nothing of ``sequence`` may be found any more."""
        self._disclaim_all(sequence)
        for block in sequence.block_ids[num_trusted:]:
            self.pool.forget(block)
        sequence.forget_keys()

    def flush(self, sequences: Iterable[SequenceBlocks]) -> int:
        """Forget every block's content, the host's too. ``sequences``: those holding blocks; they stay unfindable until released.

        Returns the number of blocks that were findable.
        """
        self._being_computed.clear()
        for sequence in sequences:
            sequence.forget_keys()
        return self.pool.forget_all() + self.host.clear()

    def check(self, sequences: Iterable[SequenceBlocks], pinned: Iterable[bytes] = (), num_reserved: int = 0) -> None:
        """Raise AssertionError unless every block is accounted for by exactly its holders.

        ``pinned``: keys that the host must keep for somebody; ``num_reserved``: host blocks being filled. Not to be called while a plan is written.
        """
        assert not self.has_swaps, "copies that no plan carries"
        assert not self.has_copies, "copies that no plan carries"
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

    def _disclaim_all(self, sequence: SequenceBlocks) -> None:
        for key in sequence.keys[sequence.num_registered :]:
            self._disclaim(key, sequence)
        if sequence.part is not None:
            self._disclaim(sequence.part, sequence)

    def _disclaim(self, key: bytes, sequence: SequenceBlocks) -> None:
        if self._being_computed.get(key) is sequence:
            del self._being_computed[key]
