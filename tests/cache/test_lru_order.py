"""LruOrder: the order of last use, beside a dictionary that keeps its order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastengine.cache.lru_order import LruOrder


@given(st.integers(1, 9), st.lists(st.tuples(st.sampled_from("erpc"), st.lists(st.integers(0, 8), unique=True), st.integers(0, 9)), max_size=40))
def test_it_does_what_an_ordered_dictionary_does(num_blocks: int, events: list[tuple[str, list[int], int]]) -> None:
    order, model = LruOrder(num_blocks), dict[int, None]()
    for kind, blocks, number in events:
        if kind == "e":
            added = [block for block in blocks if block < num_blocks and block not in model]
            order.extend(added)
            model.update(dict.fromkeys(added))
        elif kind == "r" and number in model:
            order.remove(number)
            del model[number]
        elif kind == "p":
            count = min(number, len(model))
            oldest = list(model)[:count]
            assert order.pop_oldest(count) == oldest
            model = {block: None for block in model if block not in oldest}
        elif kind == "c" and number == 0:
            order.clear()
            model.clear()
        order.check()
        assert list(order) == list(model)
        assert len(order) == len(model)


def test_check_notices_a_wrong_link_and_a_wrong_size() -> None:
    order = LruOrder(4)
    order.extend([2, 0, 1])
    order._older[1] = 2
    with pytest.raises(AssertionError, match="block 1 stands behind 0"):
        order.check()
    order = LruOrder(4)
    order.extend([2, 0, 2])
    with pytest.raises(AssertionError, match="counted"):
        order.check()
