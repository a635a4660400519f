"""What must hold between any two events, as one function that looks at everything."""

from __future__ import annotations

from fastengine.cache.kv_cache_manager import KVCacheManager
from fastengine.engine.request_state import RequestStatus, RequestTable
from fastengine.engine.slots import SlotTable
from fastengine.engine.waiting_room import WaitingRoom


def check_engine(table: RequestTable, slots: SlotTable, waiting: WaitingRoom, kv: KVCacheManager) -> None:
    """Raise AssertionError when table, slots, waiting room and blocks contradict each other."""
    kv.check(request.blocks for request in table)
    running = slots.running()
    assert len(running) == slots.num_used, f"{len(running)} requests in {slots.num_used} used slots"
    assert {r.request_id for r in running} == {r.request_id for r in table if r.status is RequestStatus.RUNNING}, "running requests and slots differ"
    assert len(waiting) == len(table) - len(running), f"{len(waiting)} requests wait, {len(table) - len(running)} should"
    waiting.check()
    for request in running:
        slot = request.slot
        assert slots.requests[slot] is request, f"slot {slot} is not {request.request_id}'s"
        assert slots.capacity[slot] == len(request.blocks.block_ids) * kv.block_size, f"slot {slot}: capacity and block table differ"
        assert slots.num_computed[slot] <= slots.capacity[slot], f"slot {slot} computes past its blocks"
        assert slots.num_known[slot] <= request.end, f"slot {slot} has more tokens than it may"
    for request in table:
        if request.status is not RequestStatus.RUNNING:
            assert not request.blocks.block_ids, f"{request.request_id} is {request.status.name} and holds blocks"
            assert request.slot < 0, f"{request.request_id} is {request.status.name} and has a slot"
