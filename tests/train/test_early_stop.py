"""A run ends after so many validations without an improvement, counted over resumes."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.train.early_stop import EarlyStop


def stops_at(stop: EarlyStop, values: list[float]) -> int | None:
    """The number of the value at which it says stop."""
    return next((number for number, value in enumerate(values) if stop.should_stop(value, number)), None)


@pytest.mark.parametrize(
    ("given", "values", "at"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.0, 2.5], 3),
        ({"patience": 2}, [3.0, 2.0, 2.0, 1.9, 2.0, 2.0], 5),
        ({"patience": 1}, [3.0, 2.9, 2.9], 2),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.4, 2.0, 1.95], 4),
        ({"patience": 2, "mode": "max"}, [0.1, 0.2, 0.15, 0.2], 3),
        ({"patience": 2}, [math.nan, 1.0, math.nan, math.inf], 3),
        ({"patience": 3}, [5.0, 4.0, 3.0, 2.0], None),
    ],
)
def test_it_stops_after_its_patience(given, values, at):
    assert stops_at(EarlyStop(**given), values) == at


def test_small_gains_that_add_up_are_an_improvement():
    stop = EarlyStop(patience=3, min_delta=0.1)
    assert stops_at(stop, [1.0, 0.95, 0.89, 0.85, 0.78]) is None
    assert (stop.best, stop.waited) == (0.78, 0)


@given(values=st.lists(st.floats(-5, 5), max_size=30), cut=st.integers(0, 30), patience=st.integers(1, 5))
def test_a_cut_changes_nothing(values, cut, patience):
    first = EarlyStop(patience)
    answers = [first.should_stop(value, step) for step, value in enumerate(values[:cut])]
    second = EarlyStop(patience)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    answers += [second.should_stop(value, cut + step) for step, value in enumerate(values[cut:])]
    whole = EarlyStop(patience)
    assert answers == [whole.should_stop(value, step) for step, value in enumerate(values)]
    assert second == whole


@pytest.mark.parametrize(
    ("given", "values", "why"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.25], "the last 2 validations did not improve on 2.0000 of step 1"),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.9], "the last validation did not improve on 3.0000 of step 0 by more than 0.5"),
        ({"patience": 2}, [math.nan, math.nan], "the last 2 validations returned NaN"),
    ],
)  # fmt: skip
def test_it_says_what_the_waiting_brought(given, values, why):
    stop = EarlyStop(**given)
    assert stops_at(stop, values) == len(values) - 1
    assert (stop.is_over, stop.why) == (True, why)


def test_a_checkpoint_without_the_step_of_the_best_goes_on():
    stop = EarlyStop(patience=1)
    stop.load_state_dict({"best": 2.0, "waited": 1})
    assert (stop.is_over, stop.why) == (True, "the last validation did not improve on 2.0000")
