"""WorkerStart: from the ranks' first words to KV memory on all of them."""

from __future__ import annotations

from pathlib import Path

from fastengine.config import DEFAULT_DECODE_RUN_MS, CacheConfig
from fastengine.ipc.runtime_dir import RuntimeDir
from fastengine.protocol.steps import WorkerCommand, WorkerReady, WorkerReply

# EngineCore numbers its commands from 1.
INIT_CACHE_ID = 0


class EngineFailed(RuntimeError):
    """The engine can't go on; the message is what the console shows."""


def open_kv_storage(config: CacheConfig) -> RuntimeDir | None:
    """A directory of this engine's own in ``--kv-storage-path``, empty; what dead engines left there is removed.

    None without that flag. Raises EngineFailed.
    """
    if config.kv_storage_path is None:
        return None
    root = Path(config.kv_storage_path)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return RuntimeDir.create(root.absolute(), holds_sockets=False)
    except OSError as error:
        raise EngineFailed(f"--kv-storage-path {root} can't be used: {error}") from None


class WorkerStart:
    """One generation's start. Each rank says that it is ready, is told to take KV memory, and confirms."""

    def __init__(self, config: CacheConfig, num_ranks: int, storage_dir: Path | None = None, decode_run_ms: float | None = None):
        """``storage_dir``: where ranks keep KV blocks in files; None: nowhere. ``decode_run_ms`` is SchedulerConfig's."""
        self._config = config
        self._num_ranks = num_ranks
        self._storage_dir = storage_dir
        self._decode_run_ms = decode_run_ms
        self._confirmed: set[int] = set()
        self.ready: dict[int, WorkerReady] = {}

    @property
    def num_blocks(self) -> int:
        """KV blocks on each rank: as configured, or what fits the rank with the least room."""
        return self._config.num_gpu_blocks_override or min(rank.num_blocks for rank in self.ready.values())

    @property
    def num_host_blocks(self) -> int:
        return int(self._config.swap_space * 2**30) // self._bytes_per_block

    @property
    def num_disk_blocks(self) -> int:
        return int(self._config.kv_storage_gib * 2**30) // self._bytes_per_block if self._storage_dir else 0

    @property
    def decode_run_ms(self) -> float:
        """What a plan of decodes alone may take; 0: one step a plan. As configured, or by what the ranks gain from it."""
        if self._decode_run_ms is not None:
            return self._decode_run_ms
        return DEFAULT_DECODE_RUN_MS if all(rank.computes_runs for rank in self.ready.values()) else 0.0

    @property
    def _bytes_per_block(self) -> int:
        return max(1, max(rank.bytes_per_block for rank in self.ready.values()))

    def rank_is_ready(self, ready: WorkerReady) -> WorkerCommand | None:
        """The command that makes the KV caches, once the last rank is ready. Raises EngineFailed."""
        self.ready[ready.rank] = ready
        if len(self.ready) < self._num_ranks:
            return None
        if self.num_blocks < 1:
            raise EngineFailed("there is no memory for a single KV block: lower --block-size or --max-num-seqs, or set --kv-cache-memory-gib")
        args: dict[str, object] = {"num_blocks": self.num_blocks, "num_host_blocks": self.num_host_blocks}
        if self._storage_dir is not None:
            if not self.num_host_blocks or not self.num_disk_blocks:
                raise EngineFailed(f"a KV block has {self._bytes_per_block} bytes: --swap-space and --kv-storage-size must hold at least one")
            args["storage_dir"] = str(self._storage_dir)
        return WorkerCommand(command_id=INIT_CACHE_ID, name="init_cache", args=args)

    def confirm(self, reply: WorkerReply) -> bool:
        """Take a rank's answer to that command; True when it was the last. Raises EngineFailed."""
        if reply.error:
            asked = self._config.num_gpu_blocks_override
            why = f" of --num-gpu-blocks-override {asked} blocks ({asked * self._bytes_per_block / 2**30:.1f} GiB)" if asked else ""
            raise EngineFailed(f"worker rank {reply.rank} could not make the KV cache{why}: {reply.error}")
        self._confirmed.add(reply.rank)
        return len(self._confirmed) == self._num_ranks
