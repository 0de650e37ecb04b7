import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.train.schedule import Schedule


def rates(schedule: Schedule, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(schedule.rate())
        schedule.advance()
    return found


def test_warmup_is_linear_and_reaches_the_peak_with_its_last_step():
    assert rates(Schedule(1.0, steps=100, warmup_steps=4), 4) == [0.25, 0.5, 0.75, 1.0]


def test_cosine_is_half_way_at_half_time_and_ends_at_the_lowest_rate():
    schedule = Schedule(2.0, steps=110, warmup_steps=10, min_ratio=0.1)
    found = rates(schedule, 130)
    assert found[10] == 2.0
    assert found[60] == pytest.approx(1.1)
    assert found[110:] == [pytest.approx(0.2)] * 20, "steps beyond the end stay at the lowest rate"


def test_constant_stays_at_the_peak():
    assert set(rates(Schedule(0.5, steps=5, warmup_steps=0, kind="constant"), 9)) == {0.5}


@given(steps=st.integers(1, 300), warmup=st.integers(0, 400), ratio=st.floats(0, 1))
def test_no_step_of_any_shape_leaves_the_range_between_zero_and_peak(steps, warmup, ratio):
    found = rates(Schedule(1.0, steps, warmup, ratio), steps)
    assert all(0.0 <= rate <= 1.0 for rate in found)
    after = found[warmup:]
    assert after == sorted(after, reverse=True)


def test_a_schedule_goes_on_where_another_stopped():
    whole = rates(Schedule(1.0, 50, 5), 50)
    first = Schedule(1.0, 50, 5)
    rates(first, 20)
    assert rates(Schedule(1.0, 50, 5, taken=first.taken), 30) == whole[20:]
