"""Blocks: enough steps and seconds for every rank, whatever the order in which nodes deliver their slots."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from step_windows import window

from toolkit.metrics.blocks import BlockBuilder, StepBlock
from toolkit.metrics.windows import STEP, Window


def deliver(builder: BlockBuilder, *slots: list[Window]) -> list[StepBlock]:
    return [block for several in slots for block in builder.add(several)]


def test_long_steps_wait_until_each_rank_has_fifty() -> None:
    slots = [[window(rank, number, steps=20) for rank in range(4)] for number in range(6)]
    blocks = deliver(BlockBuilder(), *slots)
    assert [[one.steps for one in block.windows] for block in blocks] == [[60] * 4, [60] * 4]
    assert [block.steps for block in blocks] == [(1, 60), (61, 120)] and blocks[0].seconds == 30


@given(st.lists(st.integers(0, 60), min_size=3, max_size=12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_step_is_used_twice_and_no_order_of_delivery_changes_the_blocks(
    steps: list[int], ranks: int, order: random.Random
) -> None:
    slots = [window(rank, number, steps=count) for number, count in enumerate(steps) for rank in range(ranks)]
    expected = BlockBuilder().add(slots)
    order.shuffle(slots)
    blocks = BlockBuilder().add(slots)
    assert blocks == expected
    assert all(one.steps >= 50 and one.seconds >= 10 for block in blocks for one in block.windows)
    assert sum(one.steps for block in blocks for one in block.windows) <= ranks * sum(steps)


def test_a_node_that_delivers_late_is_awaited() -> None:
    builder = BlockBuilder()
    early, late = [0, 1], [4, 5]
    deliver(builder, [window(rank, 0) for rank in early + late])
    assert deliver(builder, [window(rank, 1) for rank in early], [window(rank, 2) for rank in early]) == []
    blocks = deliver(builder, [window(rank, number) for number in (1, 2) for rank in late])
    assert [[one.rank for one in block.windows] for block in blocks] == [[0, 1, 4, 5]] * 2


def test_a_rank_that_left_does_not_delay_the_others() -> None:
    builder = BlockBuilder()
    deliver(builder, [window(0, 0), window(1, 0)])
    blocks = deliver(builder, *([window(0, number)] for number in range(1, 8)))
    assert blocks and all([one.rank for one in block.windows] == [0] for block in blocks)


def test_ranks_with_steps_of_minutes_do_not_count_as_absent() -> None:
    builder = BlockBuilder()
    slots = [[window(rank, 12 * number + rank, steps=1, **{STEP: 120.0})] for number in range(52) for rank in (0, 1)]
    blocks = deliver(builder, *slots)
    assert blocks and all(len(block.windows) == 2 for block in blocks)


def test_a_rank_that_moves_to_another_node_begins_again() -> None:
    slots = [[window(0, 0, steps=30, host="a")], [window(0, 1, steps=30, host="b")], [window(0, 2, steps=30, host="b")]]
    (block,) = deliver(BlockBuilder(), *slots)
    assert (block.windows[0].host, block.windows[0].steps) == ("b", 60)


def test_programs_whose_ranks_do_not_step_together_are_judged_all_the_same() -> None:
    builder = BlockBuilder()
    blocks = deliver(builder, *([window(0, number, steps=200), window(1, number, steps=1)] for number in range(6)))
    assert [one.rank for block in blocks for one in block.windows] == [0, 0]
