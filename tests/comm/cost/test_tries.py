"""What small all-reduces took corrects the model where waiting counts, and leaves it alone where bytes do."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.comm.cost.choice import Choice
from toolkit.comm.cost.measurement import SIZES_BYTES, Correction, correct, try_all
from toolkit.comm.cost.model import LINKS, Links, fit

KIB = 1024
LINE = fit({KIB: [1e-4], 1024 * KIB: [1e-2]})
MODEL = Links(**dict.fromkeys(LINKS, LINE), fold_s_per_byte=1e-10)
NODES = ((0, 1), (2, 3))


def choice_of(tried: dict[str, dict[int, float]]) -> Choice:
    return Choice(("one", "two"), NODES, ("ring", "tree", "direct"), MODEL, tried, "by hand")


@given(st.lists(st.floats(1e-6, 10), min_size=5, max_size=5), st.sampled_from(range(5)))
def test_a_prediction_at_a_tried_size_is_what_was_measured(seconds, at):
    choice = choice_of({"ring": dict(zip(SIZES_BYTES, seconds, strict=True))})
    assert choice.seconds("ring", SIZES_BYTES[at]) == pytest.approx(seconds[at])


@given(st.floats(1, 3000 * KIB), st.lists(st.floats(0.01, 100), min_size=5, max_size=5))
def test_between_tried_sizes_a_correction_lies_between_theirs(size, ratios):
    ends = [*ratios, 1.0]
    assert min(ends) * 0.999 <= Correction(SIZES_BYTES, tuple(ratios)).ratio(size) <= max(ends) * 1.001


def test_large_messages_are_as_the_model_says():
    choice = choice_of({"ring": dict.fromkeys(SIZES_BYTES, 9.0)})
    assert choice.seconds("ring", 2048 * KIB) == choice_of({}).seconds("ring", 2048 * KIB)
    assert choice.seconds("ring", 2047 * KIB) > choice_of({}).seconds("ring", 2047 * KIB)


def test_what_was_the_fastest_is_chosen_against_the_model():
    tried = {name: dict.fromkeys(SIZES_BYTES, 0.02) for name in ("ring", "tree", "direct")}
    for name in tried:
        faster = choice_of({**tried, name: dict.fromkeys(SIZES_BYTES, 0.01)})
        assert {faster.algorithm(size) for size in (100, 5 * KIB, 100 * KIB)} == {name}


def test_corrections_are_relative_to_the_model():
    found = correct({"ring": {2048: 0.3}}, lambda name, size: 0.1)
    assert found["ring"].ratio(2048) == pytest.approx(3.0)


def tries_of(state):
    """Two algorithms of about 20 ms and one of 200: whatever else the machine does, that one is hopeless."""
    calls: list[tuple[str, int]] = []

    def all_reduce(tensor, name):
        calls.append((name, tensor.nbytes))
        time.sleep(0.2 if name == "slow" else 0.02)

    return try_all(state.communicator.peers, ("one", "slow", "other"), all_reduce, 2.0), calls


def test_algorithms_are_tried_by_turns_at_all_sizes_and_a_hopeless_one_once(ranks):
    (found, calls), *others = ranks(2).run(tries_of)
    assert all(set(taken) == set(SIZES_BYTES) and min(taken.values()) > 0 for taken in found.values())
    turns = [name for name, size in calls if size == SIZES_BYTES[1]]
    assert turns[:5] == ["one", "slow", "other", "one", "other"]
    assert turns.count("slow") == 1
    assert all(other == found for other, _ in others), "of the slowest rank"
