"""DiskTransfers: KV blocks between the host tier and files, beside the steps and never in their way.

The engine decides, a thread of each worker reads and writes. Two commands carry it, answered when the last
block is done while steps and other commands go on (keys are bytes, blocks are host blocks)::

    store_blocks {remove, keys, blocks}   remove these files first, then write each block to the file of its key
    load_blocks {keys, blocks}            read each key's file into the block
    both answer {failed: [i, ...]}        places in ``keys`` that could not be written or read

A host block is pinned while it is written, and belongs to nobody while it is read into. A request whose prefix
goes on in files waits in WAITING_KV until they are read; then its blocks are found on the host. Whatever fails
is forgotten and computed again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fastengine.cache.disk_tier import DiskTier
from fastengine.cache.host_tier import HostTier
from fastengine.cache.kv_cache_manager import ON_HOST
from fastengine.engine.request_state import RequestState, RequestStatus
from fastengine.engine.starter import Starter
from fastengine.engine.waiting_room import WaitingRoom
from fastengine.engine.worker_commands import Replies, WorkerCommands
from fastengine.observability.metrics import EngineMetrics

# Waiting requests, from the first, whose prefixes are looked for in files.
LOOK_AHEAD = 8
MAX_LOADS = 4
# Blocks that may wait to be written; past it the oldest are not written at all.
MAX_CANDIDATES = 4096


@dataclass
class Load:
    """Host blocks that are being read into. ``request`` None: it no longer waits for them.

    ``pinned``: what the host has of the prefix already, kept while the request waits for the rest.
    """

    request: RequestState | None
    came_from: RequestStatus
    host: HostTier
    keys: list[bytes]
    blocks: list[int]
    pinned: list[bytes]


class DiskTransfers:
    def __init__(self, num_blocks: int, starter: Starter, waiting: WaitingRoom, commands: WorkerCommands, metrics: EngineMetrics):
        self.disk = DiskTier(num_blocks)
        self._starter = starter
        self._waiting = waiting
        self._commands = commands
        self._counters = metrics.counters
        self._candidates: deque[bytes] = deque(maxlen=MAX_CANDIDATES)
        self._storing: list[bytes] = []  # keys whose host blocks are pinned while they are written
        self._store_is_out = False
        self._generation = 0
        self._loads: list[Load] = []

    @property
    def is_enabled(self) -> bool:
        return self.disk.num_blocks > 0

    @property
    def num_waiting(self) -> int:
        """Requests in WAITING_KV because of a load."""
        return sum(1 for load in self._loads if load.request is not None)

    def saved(self, keys: list[bytes]) -> None:
        """A plan copies these to the host: from there they can be written."""
        self._candidates.extend(keys)

    def begin(self) -> None:
        """Send what is due to the workers. To be called after plans were published and requests have come."""
        if not self._store_is_out and (self._candidates or self.disk.has_removals):
            self._store()
        if len(self._loads) < MAX_LOADS and not self._waiting.is_settled:
            self._load_ahead()

    # -- host to disk ---------------------------------------------------------------------------

    def _store(self) -> None:
        host, disk = self._starter.kv.host, self.disk
        most = min(self._starter.kv.max_swaps, disk.num_blocks)
        keys: list[bytes] = []
        while self._candidates and len(keys) < most:
            key = self._candidates.popleft()
            if key in host and not disk.knows(key) and key not in keys:
                keys.append(key)
        disk.begin_store(keys)
        removals = disk.take_removals()
        if not keys and not removals:
            return
        host.pin(keys)
        self._storing, self._store_is_out = keys, True
        generation = self._generation
        args = {"remove": removals, "keys": keys, "blocks": [host.block_of[key] for key in keys]}
        self._commands.send("store_blocks", args, lambda replies: self._stored(host, keys, removals, generation, replies))

    def _stored(self, host: HostTier, keys: list[bytes], removals: list[bytes], generation: int, replies: Replies) -> None:
        self._store_is_out = False
        if any(reply.error for reply in replies):
            self.disk.remove_later(removals)  # perhaps the command never arrived
        failed = _failed(replies, len(keys))
        self._counters["stored_blocks"] += len(keys) - len(failed)
        self._counters["storage_failures"] += len(failed)
        if generation == self._generation:
            host.unpin(keys)
            self._storing = []
        else:
            failed = set(range(len(keys)))  # forgotten while they were written
        self.disk.end_store([key for i, key in enumerate(keys) if i not in failed], [keys[i] for i in sorted(failed)])

    # -- disk to host ---------------------------------------------------------------------------

    def _load_ahead(self) -> None:
        index = 0
        for _ in range(LOOK_AHEAD):
            request = self._waiting.at(index)
            if request is None or len(self._loads) >= MAX_LOADS:
                return
            if request.looked_on_disk or not self._load(request):
                index += 1

    def _load(self, request: RequestState) -> bool:
        """Begin to read what files hold of ``request``'s prefix; whether there was anything."""
        request.looked_on_disk = True
        kv = self._starter.kv
        self._starter.identify(request)
        hits = self._starter.hits(request)
        keys = self._on_disk(request, len(hits))
        pinned = [key for key, block in zip(request.blocks.keys, hits.blocks, strict=False) if block == ON_HOST]
        kv.host.pin(pinned)
        blocks = kv.host.reserve(len(keys))
        keys = keys[: len(blocks)]
        if not keys:
            kv.host.unpin(pinned)
            return False
        self.disk.touch(keys)
        self._waiting.take(request)
        load = Load(request, request.status, kv.host, keys, blocks, pinned)
        request.transition(RequestStatus.WAITING_KV)
        self._loads.append(load)
        generation = self._generation
        self._commands.send("load_blocks", {"keys": keys, "blocks": blocks}, lambda replies: self._loaded(load, generation, replies))
        return True

    def _on_disk(self, request: RequestState, num_hits: int) -> list[bytes]:
        """Keys behind the hits whose blocks are in files."""
        if request.needs_whole_prompt:
            return []
        keys: list[bytes] = []
        for key in request.blocks.keys[num_hits : (len(request.tokens) - 1) // self._starter.kv.block_size]:
            if key not in self.disk:
                break
            keys.append(key)
        return keys

    def _loaded(self, load: Load, generation: int, replies: Replies) -> None:
        self._loads.remove(load)
        failed = _failed(replies, len(load.keys))
        self._counters["loaded_blocks"] += len(load.keys) - len(failed)
        self._counters["storage_failures"] += len(failed)
        self.disk.forget(load.keys[i] for i in failed)
        forgotten = generation != self._generation
        # Heads last: they become the most recently used.
        for i in reversed(range(len(load.keys))):
            load.host.fill(load.blocks[i], None if forgotten or i in failed else load.keys[i])
        self._give_back(load)

    def _give_back(self, load: Load) -> None:
        """The request of ``load``, if it still waits, goes back into the waiting room."""
        request = load.request
        if request is not None:
            self._leave(load)
            request.transition(load.came_from)
            self._waiting.put_back(request)

    @staticmethod
    def _leave(load: Load) -> None:
        load.request = None
        load.host.unpin(load.pinned)
        load.pinned = []

    def drop(self, request: RequestState) -> None:
        """``request``, which waits for a load, ends. What is read meanwhile stays findable."""
        for load in self._loads:
            if load.request is request:
                self._leave(load)

    def give_up_all(self) -> None:
        """Whoever waits for a load goes back into the waiting room."""
        for load in self._loads:
            if load.request is not None:
                load.request.looked_on_disk = False
            self._give_back(load)

    # -- forgetting -----------------------------------------------------------------------------

    def flush(self) -> int:
        """Nothing of what is in files, or on its way to or from them, is found again; returns how much is stored."""
        self.give_up_all()
        self._starter.kv.host.unpin(self._storing)
        self._storing = []
        self._generation += 1
        self._candidates.clear()
        return self.disk.clear()

    def cache_is_gone(self) -> None:
        """The workers died: the host's blocks are lost, the files are not. Commands under way will be answered."""
        self._storing = []
        self._candidates.clear()

    def check(self) -> None:
        """Raise AssertionError unless the books balance."""
        self.disk.check()
        assert self._store_is_out or not self._storing, "blocks are pinned for a store that is not under way"

    def pinned_keys(self, host: HostTier) -> list[bytes]:
        """Keys that ``host`` must keep for transfers."""
        return self._storing + [key for load in self._loads if load.host is host for key in load.pinned]

    def num_reserved(self, host: HostTier) -> int:
        """Blocks of ``host`` that are being read into."""
        return sum(len(load.blocks) for load in self._loads if load.host is host)


def _failed(replies: Replies, count: int) -> set[int]:
    """Places that failed on any rank; all of them where a rank failed altogether."""
    failed: set[int] = set()
    for reply in replies:
        failed.update(range(count) if reply.error else reply.result.get("failed", ()))
    return failed
