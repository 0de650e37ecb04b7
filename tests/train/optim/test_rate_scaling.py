"""What a larger batch makes of the learning rate: the rules, and AdaScale's gain."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import job, launch

from toolkit.errors import ToolkitError
from toolkit.train.optim.adascale import AdaScale, check_parts, gain_of, mean_over, moments_of
from toolkit.train.optim.rate_scaling import rate_factor, schedule_of
from toolkit.train.schedule import Schedule


@given(batch=st.integers(1, 10**6), reference=st.integers(1, 10**6))
def test_the_rules_are_the_ratio_its_root_and_one(batch, reference):
    ratio = batch / reference
    assert rate_factor("linear", batch, reference) == ratio
    assert rate_factor("square_root", batch, reference) == pytest.approx(math.sqrt(ratio))
    assert rate_factor("none", batch, reference) == rate_factor("adaptive", batch, reference) == 1.0


def scaled(rule, **given):
    return schedule_of(job(batch=32, lr=0.5, warmup_steps=4, lr_scaling=rule, lr_reference_batch=8, **given).train)


def test_a_linearly_scaled_rate_warms_up_from_the_references_own():
    schedule = scaled("linear", schedule="linear")
    assert (schedule.start, schedule.peak, schedule.kind) == (0.5, 2.0, "linear")
    assert [schedule.rate_at(step) for step in range(4)] == [0.875, 1.25, 1.625, 2.0]
    assert (scaled("square_root").start, scaled("square_root").peak) == (0.0, 1.0)
    assert schedule_of(job(batch=32, lr=0.5).train).peak == 0.5


def test_a_rule_without_a_reference_is_refused_with_the_key():
    with pytest.raises(
        ToolkitError, match=r"train\.lr_scaling.*batch size for which `lr` was chosen.*train\.lr_reference_batch"
    ):
        job(lr_scaling="linear")
    with pytest.raises(ToolkitError, match=r"train\.lr_reference_batch: AdaScale requires a batch of at least"):
        schedule_of(job(batch=8, lr_scaling="adaptive", lr_reference_batch=64).train)


@given(variance=st.floats(1e-6, 1e6), square=st.floats(0, 1e6), scale=st.floats(1, 1000))
def test_the_gain_lies_between_one_and_the_scale(variance, square, scale):
    assert 1.0 - 1e-12 <= gain_of(variance, square, scale) <= scale * (1 + 1e-12)


def test_noise_alone_gains_all_and_agreement_nothing():
    assert gain_of(1.0, 0.0, 8) == 8
    assert gain_of(1e-6, 1e6, 8) == pytest.approx(1.0)
    assert gain_of(3.0, 1.0, 4) == pytest.approx(4 / (0.75 + 1))


@pytest.mark.parametrize(("parts", "scale"), [(4, 4.0), (8, 4.0), (2, 6.0)])
def test_the_moments_are_unbiased_whatever_the_parts(parts, scale):
    """A gradient of the reference batch has variance 3 x 5; a part is `scale / parts` reference batches."""
    generator = torch.Generator().manual_seed(1)
    trials, width, mean = 4000, 5, 0.7
    deviation = math.sqrt(3.0 / (scale / parts))
    gradients = mean + deviation * torch.randn(trials, parts, width, generator=generator, dtype=torch.float64)
    part_squares = gradients.square().sum(2).mean(1)
    mean_square = gradients.mean(1).square().sum(1)
    found = [moments_of(*pair, parts, scale) for pair in zip(part_squares.tolist(), mean_square.tolist(), strict=True)]
    variance, square = (sum(values) / trials for values in zip(*found, strict=True))
    assert variance == pytest.approx(15.0, rel=0.05)
    assert square == pytest.approx(width * mean**2, rel=0.1)


def test_moments_agree_with_the_papers_with_one_part_a_reference_batch():
    parts, squares, mean = 4, 10.0, 4.0
    variance = squares * parts / (parts - 1) - parts / (parts - 1) * mean  # the paper's, with the sum over parts
    assert moments_of(squares, mean, parts, parts) == (pytest.approx(variance), pytest.approx(mean - variance / parts))


def test_one_part_has_no_variance():
    with pytest.raises(
        ToolkitError, match=r"train\.lr_scaling: AdaScale requires two or more micro-batches .* two or more ranks"
    ):
        moments_of(1.0, 1.0, 1, 4)


@pytest.mark.parametrize(
    ("batch", "micro_batch", "ranks", "said"),
    [
        (10, 0, 4, "train.batch: AdaScale .* a batch of 10 is not divisible by 4 ranks. Fix: set batch = 8 or 12"),
        (3, 0, 4, "Fix: set batch = 4 or 4"),
        (24, 5, 2, "train.micro_batch: .* 12 samples per rank are not divisible by 5. Fix: set micro_batch = 4"),
        (24, 16, 2, "train.micro_batch: .* Fix: set micro_batch = 12"),
        (8, 8, 1, "train.lr_scaling: .*, got one. Fix: use two or more ranks"),
    ],
)
def test_parts_that_cannot_be_compared_are_refused_with_numbers_that_work(batch, micro_batch, ranks, said):
    with pytest.raises(ToolkitError, match=said):
        check_parts(batch, micro_batch, ranks)


@pytest.mark.parametrize(("batch", "micro_batch", "ranks"), [(8, 0, 2), (8, 4, 1), (24, 4, 2)])
def test_equal_parts_are_taken(batch, micro_batch, ranks):
    check_parts(batch, micro_batch, ranks)


@given(squares=st.lists(st.floats(0, 1e6), min_size=2, max_size=16), agreement=st.floats(0, 1))
def test_the_gain_that_is_measured_lies_between_one_and_the_number_of_copies(squares, agreement):
    """The mean gradient's norm is that of the mean norm at most, and nothing at least."""
    copies, mean = len(squares), sum(squares) / len(squares)
    schedule = AdaScale(Schedule(1.0, 20), float(copies))
    schedule.observe(mean, agreement * mean, copies)
    assert 1.0 - 1e-9 <= schedule.gain() <= copies * (1 + 1e-9)


def test_progress_goes_as_the_gain_and_ends_the_run_early():
    schedule = AdaScale(Schedule(1.0, 20, kind="linear", min_ratio=0.0), 4.0)
    assert (schedule.gain(), schedule.rate()) == (1.0, 1.0), "nothing was observed"
    steps = 0
    while not schedule.finished:
        schedule.observe(part_squares=4.0, mean_square=1.0, parts=4)  # noise alone: the gain is 4
        assert schedule.rate() == pytest.approx(4.0 * schedule.schedule.rate_at(int(schedule.progress)))
        schedule.advance()
        steps += 1
    assert steps == 5
    other = AdaScale(Schedule(1.0, 20, kind="linear", min_ratio=0.0), 4.0)
    other.load_state_dict(schedule.state_dict())
    assert other == schedule


def test_its_course_is_that_of_the_reference_batch_without_noise():
    schedule = AdaScale(Schedule(1.0, 20), 4.0)
    for step in range(20):
        schedule.observe(part_squares=1.0, mean_square=1.0, parts=4)  # all parts agree
        assert schedule.rate() == pytest.approx(schedule.schedule.rate_at(step), rel=1e-4)
        schedule.advance()


def over_ranks(world) -> None:
    squares = [torch.tensor(float(world.rank + number), dtype=torch.float64) for number in range(world.rank + 1)]
    assert mean_over(squares) == (pytest.approx((0 + 1 + 2) / 3), 3)


def test_squared_norms_are_averaged_over_all_parts_of_all_ranks(tmp_path):
    launch(over_ranks, 2, tmp_path)


def regression(scale: int, steps: int, *, adaptive: bool) -> tuple[float, int]:
    """SGD on a noisy linear regression with `scale` parts of 4 samples a step; the error of the weights, and the steps."""
    generator = torch.Generator().manual_seed(4)
    true, weights = torch.ones(10), torch.zeros(10)
    schedule = Schedule(0.05, steps, kind="linear", min_ratio=0.0)
    course = AdaScale(schedule, float(scale)) if adaptive else schedule
    while not (course.finished if isinstance(course, AdaScale) else course.taken == steps):
        inputs = torch.randn(scale, 4, 10, generator=generator)
        noise = 2.0 * torch.randn(scale, 4, generator=generator)
        errors = inputs @ (weights - true) - noise
        parts = (errors.unsqueeze(2) * inputs).mean(1)
        if isinstance(course, AdaScale):
            squares = [part.double().square().sum() for part in parts]
            course.observe(*mean_over(squares)[:1], parts.mean(0).double().square().sum().item(), scale)
        weights = weights - course.rate() * parts.mean(0)
        course.advance()
    return (weights - true).square().sum().item(), schedule.taken


def test_a_larger_batch_gets_as_far_in_fewer_steps_than_the_reference():
    reference, steps = regression(1, 600, adaptive=False)
    found, fewer = regression(8, 600, adaptive=True)
    assert steps == 600
    assert 600 / 8 < fewer < 600 / 3
    assert found < 2 * reference + 0.01
