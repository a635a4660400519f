"""Gauges: what is true of the engine now, read from its state at each scrape so that nothing can drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fastengine.cache.disk_tier import DiskTier
from fastengine.cache.kv_cache_manager import KVCacheManager
from fastengine.engine.pipeline import Pipeline
from fastengine.engine.request_state import RequestStatus, RequestTable
from fastengine.engine.slots import SlotTable
from fastengine.engine.waiting_room import WaitingRoom
from fastengine.observability.metrics import Gauges


def engine_gauges(
    table: RequestTable,
    slots: SlotTable,
    waiting: WaitingRoom,
    kv: KVCacheManager,
    disk: DiskTier,
    pipeline: Pipeline,
    counters: Mapping[str, int],
    flags: Mapping[str, bool],
) -> Gauges:
    """Name -> (help, value)."""
    by_status = Counter(request.status for request in table)
    running = by_status[RequestStatus.RUNNING]
    return {
        "num_requests_running": ("Requests in the running batch.", running),
        "num_requests_waiting": ("Requests that wait to run, preempted ones included.", len(table) - running),
        "num_requests_preempted": ("Requests that ran and wait to be recomputed.", by_status[RequestStatus.PREEMPTED]),
        "num_requests_waiting_kv": ("Requests whose KV is being brought back.", by_status[RequestStatus.WAITING_KV]),
        "num_queued_tokens": ("Prompt tokens of requests that never ran.", waiting.num_tokens),
        "batch_size": ("Slots in use.", slots.num_used),
        "max_batch_size": ("Slots there are.", slots.num_slots),
        "available_batch_size": ("Slots that are free.", slots.num_free),
        "num_steps_in_flight": ("Steps published and not answered.", pipeline.num_steps),
        "is_paused": ("1 while no step is planned.", float(flags["is_paused"])),
        "is_sleeping": ("1 while memory is given back to the system.", float(flags["is_sleeping"])),
        **_block_gauges(kv),
        "max_disk_block_num": ("KV blocks that may be kept in files.", disk.num_blocks),
        "disk_cache_block_num": ("KV blocks that are kept in files.", len(disk)),
        **_hit_rates(counters),
    }


def _block_gauges(kv: KVCacheManager) -> Gauges:
    used, on_host = kv.num_blocks - kv.num_available, len(kv.host)
    return {
        "max_gpu_block_num": ("KV blocks there are.", kv.num_blocks),
        "available_gpu_block_num": ("KV blocks that could be given out now, blank or cached.", kv.num_available),
        "free_gpu_block_num": ("KV blocks that hold nothing.", kv.pool.num_blank),
        "prefix_cache_block_num": ("KV blocks that can be found by their content.", len(kv.index)),
        "gpu_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", used / kv.num_blocks),
        "max_cpu_block_num": ("KV blocks there are on the host.", kv.host.num_blocks),
        "available_cpu_block_num": ("KV blocks on the host that hold nothing.", kv.host.num_blocks - on_host),
        "cpu_cache_usage_perc": ("Share of the host's KV blocks that hold something, 0 to 1.", on_host / max(1, kv.host.num_blocks)),
    }


def _hit_rates(counters: Mapping[str, int]) -> Gauges:
    tokens, requests = max(1, counters["prefix_cache_queries"]), max(1, counters["started_requests"])
    hits, host_hits = counters["prefix_cache_hits"], counters["prefix_cache_host_hits"]
    return {
        "hit_req_rate": (
            "Share of started requests that found a part of their prompt in the cache, 0 to 1.",
            counters["prefix_cache_hit_requests"] / requests,
        ),
        "hit_token_rate": ("Share of looked-up tokens found in the prefix cache, 0 to 1.", hits / tokens),
        "gpu_hit_token_rate": ("Share of looked-up tokens found on the device, 0 to 1.", (hits - host_hits) / tokens),
        "cpu_hit_token_rate": ("Share of looked-up tokens found on the host, 0 to 1.", host_hits / tokens),
    }
