"""What clients are owed: one message each, every handle once, nothing lost when nobody takes for a while."""

from __future__ import annotations

import numpy as np

from fastengine.engine.outputs import OutputCollector
from fastengine.engine.slots import ClientColumn
from fastengine.protocol.outputs import FINISH_ABORT, FINISH_STOP, OutputBatch, TokenOutput, TopLogprobs


def handles(*values: int) -> bytes:
    return np.array(values, dtype="<i8").tobytes()


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def plain(batch: OutputBatch) -> dict[int, int]:
    return dict(zip(np.frombuffer(batch.handles, "<i8").tolist(), np.frombuffer(batch.token_ids, "<i4").tolist(), strict=True))


def test_one_step_is_one_message_per_client() -> None:
    outputs = OutputCollector()
    outputs.begin_step(7)
    columns = [ClientColumn(0, handles(10, 11), np.array([0, 2])), ClientColumn(3, handles(30), np.array([1]))]
    outputs.add_columns(columns, tokens(5, 6, 7))
    outputs.add_detail(3, TokenOutput(handle=31, token_ids=[8]))
    outputs.add_detail(4, TokenOutput(handle=40, token_ids=[9]))
    taken = outputs.take()
    assert {client: plain(batch) for client, batch in taken.items()} == {0: {10: 5, 11: 7}, 3: {30: 6}, 4: {}}
    assert [output.handle for output in taken[3].details] == [31]
    assert [output.handle for output in taken[4].details] == [40]
    assert {batch.step_id for batch in taken.values()} == {7}
    assert outputs.take() == {}


def test_columns_without_rows_are_the_whole_step() -> None:
    outputs = OutputCollector()
    outputs.begin_step(1)
    outputs.add_columns([ClientColumn(2, handles(1, 2), None)], tokens(8, 9))
    assert plain(outputs.take()[2]) == {1: 8, 2: 9}


def test_two_steps_taken_together_keep_the_order_of_tokens() -> None:
    outputs = OutputCollector()
    for step, (a, b) in enumerate([(5, 6), (7, 8)]):
        outputs.begin_step(step)
        outputs.add_columns([ClientColumn(0, handles(1, 2), None)], tokens(a, b))
    (batch,) = outputs.take().values()
    assert batch.step_id == 1
    assert plain(batch) == {}
    assert {output.handle: output.token_ids for output in batch.details} == {1: [5, 7], 2: [6, 8]}


def test_details_of_two_steps_are_joined() -> None:
    outputs = OutputCollector()
    outputs.begin_step(0)
    first = TokenOutput(handle=1, token_ids=[5], logprobs=[TopLogprobs(-1.0, 1)], prompt_logprobs=[None], num_cached_tokens=4, num_prompt_tokens=9)
    outputs.add_detail(0, first)
    outputs.begin_step(1)
    outputs.add_columns([ClientColumn(0, handles(1, 2), None)], tokens(6, 3))
    outputs.begin_step(2)
    last = TokenOutput(
        handle=1, token_ids=[2], finish_reason=FINISH_STOP, stop_token_id=2, num_output_tokens=3, weight_version="v", logprobs=[TopLogprobs(-2.0, 1)]
    )
    outputs.add_detail(0, last)
    (batch,) = outputs.take().values()
    assert plain(batch) == {2: 3}
    (joined,) = batch.details
    assert joined.token_ids == [5, 6, 2]
    assert [item.logprob for item in joined.logprobs or []] == [-1.0, -2.0]
    assert (joined.prompt_logprobs, joined.num_cached_tokens, joined.num_prompt_tokens) == ([None], 4, 9)
    assert (joined.finish_reason, joined.stop_token_id, joined.num_output_tokens, joined.weight_version) == (FINISH_STOP, 2, 3, "v")


def test_an_abort_after_a_step_ends_what_the_step_gave() -> None:
    outputs = OutputCollector()
    outputs.begin_step(0)
    outputs.add_columns([ClientColumn(0, handles(1), None)], tokens(6))
    outputs.add_event(0, TokenOutput(handle=1, finish_reason=FINISH_ABORT, num_output_tokens=4))
    (batch,) = outputs.take().values()
    (joined,) = batch.details
    assert (joined.token_ids, joined.finish_reason, joined.num_output_tokens) == ([6], FINISH_ABORT, 4)


def test_a_dropped_client_is_owed_nothing() -> None:
    outputs = OutputCollector()
    outputs.begin_step(0)
    outputs.add_columns([ClientColumn(0, handles(1), np.array([0])), ClientColumn(1, handles(2), np.array([1]))], tokens(6, 7))
    outputs.add_event(1, TokenOutput(handle=3, finish_reason=FINISH_ABORT))
    outputs.drop_client(1)
    assert list(outputs.take()) == [0]
