"""Robust statistics: against the standard library, and against outliers."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.metrics.robust import entropy, mad, mann_kendall_z, theil_sen

numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.integers(-100, 100), min_size=5), st.integers(0, 10**9))
def test_one_outlier_cannot_move_the_spread_beyond_that_of_the_rest(values: list[int], outlier: int) -> None:
    spread = mad([*values, outlier], median([*values, outlier]))
    assert spread <= 1.4826 * (max(values) - min(values) + 1) or outlier <= max(values)


@given(st.floats(-10, 10), st.floats(-10, 10), st.lists(st.integers(0, 19), max_size=5, unique=True))
def test_outliers_do_not_move_the_slope(slope: float, start: float, outliers: list[int]) -> None:
    values = [start + slope * time for time in range(20)]
    for index in outliers[:4]:
        values[index] += 1e4
    clean = theil_sen(range(20), [start + slope * time for time in range(20)])
    assert clean == pytest.approx(slope, abs=1e-6)
    assert math.isfinite(theil_sen(range(20), values))
    if len(outliers) <= 1:
        assert theil_sen(range(20), values) == pytest.approx(slope, abs=1e-6)


@given(st.lists(numbers, min_size=2, max_size=30))
def test_the_trend_of_the_reversed_values_is_opposite(values: list[float]) -> None:
    assert mann_kendall_z(values) == -mann_kendall_z(values[::-1])


def test_a_trend_needs_seven_rising_values_to_exceed_three_standard_deviations() -> None:
    assert mann_kendall_z(range(6)) < 3 < mann_kendall_z(range(7))
    assert mann_kendall_z([1, 1, 1, 1]) == 0 and theil_sen([1], [5]) == 0


def test_entropy_is_highest_if_all_labels_are_equally_frequent() -> None:
    assert entropy("aaaa") == 0 and entropy("abab") == pytest.approx(math.log(2))
    assert entropy("abcd") > entropy("aabc") > entropy("aaab")
