import pytest
import torch
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


def test_linear_falls_by_the_same_at_each_step_and_then_stays():
    found = rates(Schedule(2.0, steps=14, warmup_steps=4, min_ratio=0.5, kind="linear"), 20)
    assert found[3:] == [pytest.approx(rate) for rate in (2.0, *(2.0 - 0.1 * step for step in range(10)), *[1.0] * 6)]


@pytest.mark.parametrize(("steps", "rise"), [(40, 10), (7, 2), (100, 99)])
def test_one_cycle_is_torchs(steps, rise):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    of_torch = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2.0, total_steps=steps, pct_start=rise / steps, div_factor=25, final_div_factor=0.4
    )
    expected = []
    for _ in range(steps):
        expected.append(of_torch.get_last_lr()[0])
        optimizer.step()
        if len(expected) < steps:
            of_torch.step()
    found = rates(Schedule(2.0, steps, rise, min_ratio=0.1, kind="one_cycle"), steps)
    assert found == [pytest.approx(rate, rel=1e-9) for rate in expected]


def test_a_warmup_may_begin_above_zero():
    assert rates(Schedule(5.0, 100, 4, start=1.0), 4) == [2.0, 3.0, 4.0, 5.0]


@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    ratio=st.floats(0, 1),
    kind=st.sampled_from(["cosine", "linear", "constant", "one_cycle"]),
)
def test_no_step_of_any_shape_leaves_the_range_between_zero_and_peak(steps, warmup, ratio, kind):
    found = rates(Schedule(1.0, steps, warmup, ratio, kind), steps)
    assert all(0.0 <= rate <= 1.0 for rate in found)
    after = found[warmup:]
    assert after == sorted(after, reverse=True)


def test_a_schedule_goes_on_where_another_stopped():
    whole = rates(Schedule(1.0, 50, 5), 50)
    first = Schedule(1.0, 50, 5)
    rates(first, 20)
    assert rates(Schedule(1.0, 50, 5, taken=first.taken), 30) == whole[20:]
