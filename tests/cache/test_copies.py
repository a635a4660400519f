"""Hits inside of a block: what is copied, from where, and that the source is there when it is copied."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastengine.cache.branches import Tokens
from fastengine.cache.kv_cache_manager import LEAST_SHARE, Hits, KVCacheManager, SequenceBlocks
from fastengine.cache.prefix_index import root_key

ROOT = root_key(0, "", "")
SIZE = 4


def tokens_of(*tokens: int) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def admitted(kv: KVCacheManager, tokens: Tokens, root: bytes = ROOT) -> tuple[SequenceBlocks, Hits]:
    sequence = SequenceBlocks()
    kv.identify(sequence, root, tokens.tobytes())
    hits = kv.with_copy(sequence, kv.lookup(sequence, len(tokens)), tokens, 0)
    kv.allocate(sequence, hits, tokens)
    return sequence, hits


def computed(kv: KVCacheManager, tokens: Tokens, root: bytes = ROOT) -> tuple[SequenceBlocks, Hits, list[int]]:
    """A sequence that one plan has started and computed, and the plan's copies."""
    sequence, hits = admitted(kv, tokens, root)
    kv.register(sequence, tokens)
    return sequence, hits, kv.take_copies()


def test_what_two_prompts_share_inside_of_a_block_is_copied() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    first, _, copies = computed(kv, tokens_of(1, 2, 3, 4, 5, 6, 7, 8))
    assert copies == []
    second, hits, copies = computed(kv, tokens_of(1, 2, 3, 4, 5, 6, 0, 0))
    assert (hits.blocks, hits.num_copied, hits.num_tokens(SIZE)) == (first.block_ids[:1], 2, 6)
    assert copies == [first.block_ids[1], second.block_ids[1]]
    kv.check([first, second])
    # A third that begins like both shares more with the second.
    _, hits, copies = computed(kv, tokens_of(1, 2, 3, 4, 5, 6, 0, 9))
    assert hits.num_tokens(SIZE) == 7
    assert copies[0] == second.block_ids[1]


def test_the_last_token_is_left_to_compute() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    first, _, _ = computed(kv, tokens_of(1, 2, 3, 4))
    for tokens in ([1, 2, 3, 4], [1, 2, 3], [1, 2]):
        second, hits, copies = computed(kv, tokens_of(*tokens))
        assert hits.num_tokens(SIZE) == len(tokens) - 1
        assert copies[0] == first.block_ids[0] or len(tokens) < 4
        kv.release(second)
    assert computed(kv, tokens_of(1))[1].num_copied == 0


def num_found(kv: KVCacheManager, *tokens: int) -> int:
    """How many tokens of such a prompt are found."""
    sequence, hits = admitted(kv, tokens_of(*tokens))
    kv.take_copies()
    kv.release(sequence)
    return hits.num_tokens(SIZE)


def test_the_end_of_a_sequence_is_found_while_it_goes_on_and_when_it_has_left() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    prompt = [1, 2, 3, 4, 5, 6]
    first, _, _ = computed(kv, tokens_of(*prompt))
    assert num_found(kv, *prompt, 7) == 6
    kv.grow_decoding([first])
    known = tokens_of(*prompt, 7, 8, 9)
    kv.identify(first, ROOT, known.tobytes())
    kv.register(first, known)
    # Its second block was known by a part, and is by the whole.
    assert len(kv.index) == 3
    kv.check([first])
    kv.release(first)
    assert num_found(kv, *prompt, 7, 8, 9, 50) == 9
    assert num_found(kv, *prompt, 50) == 6
    kv.check([])


def test_a_part_that_another_block_holds_as_a_whole_is_given_up() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    first, _, _ = computed(kv, tokens_of(1, 2))
    second, _, _ = computed(kv, tokens_of(1, 2, 3, 4))
    known = tokens_of(1, 2, 3, 4)
    kv.identify(first, ROOT, known.tobytes())
    kv.register(first, known)
    kv.release(first)
    assert kv.pool.num_blank == 19
    assert kv.pool.num_retained == 0
    kv.check([second])


def test_equal_prompts_wait_for_one_another() -> None:
    kv = KVCacheManager(20, SIZE, enable_prefix_caching=True)
    for prompt in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
        first, hits = admitted(kv, tokens_of(*prompt))
        same, other = SequenceBlocks(), SequenceBlocks()
        kv.identify(same, ROOT, tokens_of(*prompt).tobytes())
        kv.identify(other, ROOT, tokens_of(*prompt[:-1], 50).tobytes())
        assert kv.is_being_computed(same, len(hits))
        assert not kv.is_being_computed(other, len(prompt) // SIZE)
        kv.register(first, tokens_of(*prompt))
        kv.take_copies()
        assert not kv.is_being_computed(same, len(hits))
        kv.release(first)
        kv.flush([])
        # A claim ends with its owner, too.
        first, _ = admitted(kv, tokens_of(*prompt))
        kv.release(first)
        assert not kv.is_being_computed(same, 0)


def test_a_source_can_not_be_evicted_before_the_plan_is_complete() -> None:
    kv = KVCacheManager(2, SIZE, enable_prefix_caching=True)
    first, _, _ = computed(kv, tokens_of(1, 2, 3, 4))
    kv.release(first)
    second, hits = admitted(kv, tokens_of(1, 2, 9))
    assert hits.num_copied == 2
    assert kv.num_available == 0
    kv.take_copies()
    assert kv.num_available == 1
    kv.check([second])
    # With no block to spare for it, nothing is copied.
    third, hits = admitted(kv, tokens_of(1, 2, 8))
    assert hits.num_copied == 0
    kv.check([second, third])


def test_a_source_counts_as_used() -> None:
    kv = KVCacheManager(4, SIZE, enable_prefix_caching=True)
    first, _, _ = computed(kv, tokens_of(1, 2, 3, 4))
    kv.release(first)
    other, _, _ = computed(kv, tokens_of(5, 6, 7, 8))
    kv.release(other)
    second, _, copies = computed(kv, tokens_of(1, 2, 9))
    assert copies[0] == 0  # the first's block
    kv.release(second)
    admitted(kv, tokens_of(*range(20, 28)))
    assert [kv.index.find(key) for key in (first.keys[0], other.keys[0])] == [0, None]


def test_too_little_is_not_copied() -> None:
    kv = KVCacheManager(4, 64, enable_prefix_caching=True)
    least = 64 // LEAST_SHARE
    computed(kv, np.arange(64, dtype=np.int32))
    for shared, expected in [(least, least), (least - 1, 0)]:
        sequence, hits = admitted(kv, np.r_[np.arange(shared), 99].astype(np.int32))
        assert hits.num_copied == expected
        kv.take_copies()
        kv.release(sequence)


@pytest.mark.parametrize("what", ["root", "flush", "disown"])
def test_what_others_must_not_find_is_not_copied(what: str) -> None:
    kv = KVCacheManager(10, SIZE, enable_prefix_caching=True)
    tokens = tokens_of(1, 2, 3, 4, 5, 6)
    first, _, _ = computed(kv, tokens)
    if what == "flush":
        kv.flush([first])
    elif what == "disown":
        kv.disown(first, 0)
    _, hits = admitted(kv, tokens, root_key(0, "", "salt") if what == "root" else ROOT)
    assert hits.num_tokens(SIZE) == 0


def test_without_caching_nothing_is_copied() -> None:
    kv = KVCacheManager(10, SIZE, enable_prefix_caching=False)
    for _ in range(2):
        _, hits, copies = computed(kv, tokens_of(1, 2, 3, 4, 5, 6))
        assert hits.num_tokens(SIZE) == 0
        assert copies == []


class Memory:
    """KV as what it depends on: of each position of a block the root and all tokens up to it."""

    def __init__(self, num_blocks: int, num_host_blocks: int):
        self.device: list[list[Any]] = [[None] * SIZE for _ in range(num_blocks)]
        self.host: list[list[Any]] = [[None] * SIZE for _ in range(num_host_blocks)]

    def write(self, sequence: SequenceBlocks, root: bytes, tokens: list[int], first: int) -> None:
        for at in range(first, len(tokens)):
            self.device[sequence.block_ids[at // SIZE]][at % SIZE] = (root, *tokens[: at + 1])

    def assert_holds(self, sequence: SequenceBlocks, root: bytes, tokens: list[int]) -> None:
        for at in range(len(tokens)):
            assert self.device[sequence.block_ids[at // SIZE]][at % SIZE] == (root, *tokens[: at + 1])

    def move(self, swap_out: list[int], swap_in: list[int], copies: list[int]) -> None:
        for moved, source, target in ((swap_out, self.device, self.host), (swap_in, self.host, self.device), (copies, self.device, self.device)):
            for at in range(0, len(moved), 2):
                target[moved[at + 1]] = list(source[moved[at]])


class CopyMachine(RuleBasedStateMachine):
    """Plans of any starts, pieces of prompts and growths, over memory that knows what it holds."""

    @initialize(num_blocks=st.integers(2, 14), num_host_blocks=st.sampled_from([0, 4, 20]), max_swaps=st.integers(1, 4))
    def begin(self, num_blocks: int, num_host_blocks: int, max_swaps: int) -> None:
        self.kv = KVCacheManager(num_blocks, SIZE, enable_prefix_caching=True, num_host_blocks=num_host_blocks, max_swaps=max_swaps)
        self.memory = Memory(num_blocks, num_host_blocks)
        self.running: list[tuple[SequenceBlocks, bytes, list[int], int]] = []  # root, known tokens, how many are computed
        self.num_copied = 0

    @rule(
        starts=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=14)), max_size=3),
        lengths=st.lists(st.integers(0, 20), min_size=20, max_size=20),
        decoded=st.integers(0, 1),
    )
    def plan(self, starts: list[tuple[bool, list[int]]], lengths: list[int], decoded: int) -> None:
        kv, computing = self.kv, []
        for place, (sequence, _root, tokens, at) in enumerate(self.running):
            if at < len(tokens):
                computing.append((place, at, min(len(tokens), at + lengths[place % 20])))
            elif kv.num_available or len(tokens) % SIZE:
                if len(tokens) == len(sequence.block_ids) * SIZE:
                    kv.grow_decoding([sequence])
                tokens.append(decoded)
                computing.append((place, at, at + 1))
        for salted, tokens in starts:
            root = root_key(0, "", "salt" if salted else "")
            sequence, packed = SequenceBlocks(), tokens_of(*tokens)
            kv.identify(sequence, root, packed.tobytes())
            hits = kv.lookup(sequence, len(tokens)).with_at_most(kv.num_swap_ins_left)
            hits = kv.with_copy(sequence, hits, packed, 0)
            if not kv.can_allocate(hits, len(tokens), 0):
                continue
            assert hits.num_tokens(SIZE) < len(tokens)
            kv.allocate(sequence, hits, packed)
            self.running.append((sequence, root, list(tokens), hits.num_tokens(SIZE)))  # hypothesis keeps what it has drawn
            computing.append((len(self.running) - 1, hits.num_tokens(SIZE), len(tokens)))
        swap_out, swap_in, _ = kv.take_swaps()
        copies = kv.take_copies()
        assert not set(copies[::2]) & set(copies[1::2])
        self.memory.move(swap_out, swap_in, copies)
        self.num_copied += len(copies) // 2
        for place, at, _end in computing:
            sequence, root, tokens, _ = self.running[place]
            self.memory.assert_holds(sequence, root, tokens[:at])
        for place, at, end in computing:
            sequence, root, tokens, _ = self.running[place]
            self.memory.write(sequence, root, tokens[:end], at)
            self.running[place] = sequence, root, tokens, end
            kv.register(sequence, tokens_of(*tokens[:end]))

    @rule(which=st.integers(0, 20))
    def leave(self, which: int) -> None:
        if self.running:
            sequence, root, tokens, at = self.running.pop(which % len(self.running))
            if sequence.root is not None:
                if at > sequence.num_identified:
                    self.kv.identify(sequence, root, tokens_of(*tokens[:at]).tobytes())
                self.kv.register(sequence, tokens_of(*tokens[:at]))
            self.kv.release(sequence)

    @rule(which=st.integers(0, 20))
    def fail(self, which: int) -> None:
        if self.running:
            sequence, *_ = self.running[which % len(self.running)]
            self.kv.disown(sequence, 0)

    @rule()
    def flush(self) -> None:
        self.kv.flush(sequence for sequence, *_ in self.running)

    @invariant()
    @precondition(lambda self: hasattr(self, "kv"))
    def all_is_accounted_for(self) -> None:
        self.kv.check(sequence for sequence, *_ in self.running)
        for sequence, root, tokens, at in self.running:
            self.memory.assert_holds(sequence, root, tokens[:at])


TestCopies = CopyMachine.TestCase
TestCopies.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
