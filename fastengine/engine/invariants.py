"""What must hold between any two events, as one function that looks at everything."""

from __future__ import annotations

from fastengine.engine.request_state import RequestStatus, RequestTable
from fastengine.engine.resource_manager import ResourceManager
from fastengine.engine.slots import SlotTable
from fastengine.engine.waiting_room import WaitingRoom


def check_engine(table: RequestTable, slots: SlotTable, waiting: WaitingRoom, resources: ResourceManager) -> None:
    """Raise AssertionError when table, slots, waiting room and blocks contradict each other."""
    resources.check(request.blocks for request in table)
    block_size = resources.kv.block_size
    slots.check()
    running = slots.running()
    assert len(running) == slots.num_used, f"{len(running)} requests in {slots.num_used} used slots"
    assert {r.request_id for r in running} == {r.request_id for r in table if r.status is RequestStatus.RUNNING}, "running requests and slots differ"
    restoring = table.count(RequestStatus.WAITING_KV)
    assert restoring == resources.num_restoring, f"{restoring} requests wait for KV, {resources.num_restoring} are being restored"
    should_wait = len(table) - len(running) - restoring
    assert len(waiting) == should_wait, f"{len(waiting)} requests wait, {should_wait} should"
    waiting.check()
    for request in running:
        slot = request.slot
        assert slots.requests[slot] is request, f"slot {slot} is not {request.request_id}'s"
        assert slots.capacity[slot] == len(request.blocks.block_ids) * block_size, f"slot {slot}: capacity and block table differ"
        assert slots.num_computed(slot) <= slots.capacity[slot], f"slot {slot} computes past its blocks"
        assert slots.num_known(slot) <= request.end, f"slot {slot} has more tokens than it may"
    for request in table:
        if request.status is not RequestStatus.RUNNING:
            assert not request.blocks.block_ids or request.status is RequestStatus.WAITING_KV, (
                f"{request.request_id} is {request.status.name} and holds blocks"
            )
            assert request.slot < 0, f"{request.request_id} is {request.status.name} and has a slot"
