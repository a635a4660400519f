"""Who is looked at next: the window before the scheduler, preempted requests first, priorities through both."""

from __future__ import annotations

from typing import Literal

import pytest

from fastengine.engine.request_state import RequestState, RequestStatus
from fastengine.engine.waiting_room import WINDOW, WaitingRoom
from fastengine.protocol.requests import GenerateRequest, SamplingParams
from fastengine.protocol.tokens import pack_token_ids
from fastengine.scheduler.local import LocalScheduler


def state(number: int, *, priority: int = 0, length: int = 2) -> RequestState:
    request = GenerateRequest(
        request_id=f"r{number}",
        client_index=0,
        handle=number,
        prompt_token_ids=pack_token_ids([1] * length),
        sampling=SamplingParams(),
        priority=priority,
    )
    return RequestState(request, arrival_number=number, arrived_at=0.0, end=10, seed=0)


def room_of(count: int, policy: Literal["fcfs", "priority"] = "fcfs") -> tuple[WaitingRoom, list[RequestState]]:
    room = WaitingRoom(LocalScheduler(policy))
    states = [state(i) for i in range(count)]
    for one in states:
        room.put(one)
    return room, states


def preempted(number: int, priority: int = 0) -> RequestState:
    one = state(number, priority=priority)
    one.transition(RequestStatus.RUNNING)
    one.transition(RequestStatus.PREEMPTED)
    return one


def test_requests_are_seen_in_order_and_only_a_window_of_them() -> None:
    room, states = room_of(3 * WINDOW)
    assert [room.at(i) for i in range(WINDOW)] == states[:WINDOW]
    assert room.at(WINDOW) is None
    room.take(states[0])
    assert room.at(WINDOW - 1) is states[WINDOW]
    assert len(room) == room.num_waiting == 3 * WINDOW - 1
    room.check()


def test_preempted_requests_come_first_and_widen_the_window() -> None:
    room, states = room_of(2 * WINDOW)
    room.at(0)
    late, early = preempted(900), preempted(800)
    room.put_back(late)
    room.put_back(early)
    assert [room.at(i) for i in range(3)] == [early, late, states[0]]
    assert room.at(WINDOW + 1) is states[WINDOW - 1]
    assert (room.num_preempted, room.num_waiting) == (2, 2 * WINDOW)
    room.take(early)
    assert room.num_preempted == 1
    room.check()


def test_a_request_that_never_ran_can_come_back_to_its_place() -> None:
    room, states = room_of(3)
    room.at(0)
    room.take(states[1])
    states[1].transition(RequestStatus.WAITING_KV)
    states[1].transition(RequestStatus.WAITING)
    room.put_back(states[1])
    assert [room.at(i) for i in range(3)] == states
    assert (room.num_preempted, room.num_tokens) == (0, 6)
    room.check()


def test_a_better_priority_gets_into_a_full_window() -> None:
    room, _ = room_of(2 * WINDOW, "priority")
    room.at(0)
    urgent, lazy = state(1000, priority=-1), state(1001, priority=5)
    room.put(lazy)
    room.put(urgent)
    assert room.at(0) is not urgent  # not looked for yet
    room.refresh()
    assert room.at(0) is urgent
    assert lazy not in [room.at(i) for i in range(WINDOW)]
    back = preempted(1002, priority=0)
    room.put_back(back)
    assert [room.at(0), room.at(1)] == [urgent, back]
    room.check()


def test_tokens_and_removal_from_window_and_scheduler() -> None:
    room, states = room_of(2 * WINDOW)
    room.at(0)
    assert room.num_tokens == 4 * WINDOW
    room.is_settled = True
    room.remove(states[0])
    room.remove(states[-1])
    assert not room.is_settled
    assert room.num_tokens == 4 * WINDOW - 4
    with pytest.raises(ValueError, match="not in list"):
        room.remove(states[0])
    room.check()


@pytest.mark.parametrize("change", ["put", "put_back"])
def test_whoever_comes_unsettles_the_room(change: str) -> None:
    room, _ = room_of(1)
    room.is_settled = True
    room.put(state(50)) if change == "put" else room.put_back(preempted(50))
    assert not room.is_settled
