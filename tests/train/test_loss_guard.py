"""Losses, and norms of gradients, that are no numbers and spikes: what they lead to, how often, and what a roll-back does not forget."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.train.guard import LossGuard


def judged(guard: LossGuard, losses: list[float]) -> list[str]:
    return [guard.judge(step, loss, range(step * 4, step * 4 + 4)).action for step, loss in enumerate(losses)]


def judged_with_norms(guard: LossGuard, losses: list[float]) -> list[str]:
    """Norms that are good where losses are not, and the other way round."""
    pairs = zip(losses, reversed(losses), strict=True)
    return [guard.judge(step, loss, range(4), norm).action for step, (loss, norm) in enumerate(pairs)]


def warm(policy="skip", **given) -> LossGuard:
    guard = LossGuard(policy, **given)
    assert set(judged(guard, [2.0 + 0.05 * (step % 5) for step in range(20)])) == {"go_on"}
    return guard


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 50.0])
def test_a_bad_loss_is_skipped_in_one_line(bad):
    decision = warm().judge(20, bad, range(80, 84))
    assert decision.action == "skip"
    assert decision.next_sample == 84
    assert decision.line.startswith("step 20: the loss is ")
    assert decision.line.endswith("(samples 80 to 83; bad step 1 of 10 allowed): skipping its update")


def test_a_roll_back_goes_on_past_the_samples():
    decision = warm("roll_back").judge(20, math.nan, range(80, 84))
    assert (decision.action, decision.next_sample) == ("roll_back", 84)
    assert decision.line.endswith("rolling back to the last checkpoint and continuing from sample 84")


def test_nothing_is_judged_when_it_is_off_and_no_spike_is_seen_before_enough_losses():
    assert judged(LossGuard("off"), [1.0, math.nan, 1e9]) == ["go_on"] * 3
    assert judged(LossGuard("skip"), [1.0, 100.0, math.nan, 1.0]) == ["go_on", "go_on", "skip", "go_on"]


def test_bad_losses_do_not_move_the_limit_and_a_falling_loss_is_none():
    guard = warm()
    assert judged(guard, [50.0] * 9) == ["skip"] * 9
    falling = LossGuard("skip")
    assert set(judged(falling, [5.0 * 0.97**step for step in range(200)])) == {"go_on"}
    assert set(judged(LossGuard("skip"), [2.0] * 30 + [2.01] * 30)) == {"go_on"}, "a loss that stood still may move"


def test_spikes_within_the_window_do_not_hide_the_next():
    """A mean and a standard deviation would: one accepted loss of 100 among 20 raises the limit above 190."""
    losses = [2.0 + 0.05 * (step % 5) for step in range(7)]
    guard = LossGuard("skip")
    assert judged(guard, [*losses, 100.0, *losses, *losses, 6.0])[-1] == "skip"


def test_one_bad_step_more_than_allowed_ends_the_run():
    guard = warm(limit=2)
    assert judged(guard, [math.nan, math.nan]) == ["skip", "skip"]
    with pytest.raises(
        ToolkitError,
        match=r"train\.guard_limit: the loss is nan at step 22, and the run has already had the allowed 2 bad",
    ):
        guard.judge(22, math.nan, range(4))
    with pytest.raises(ToolkitError, match="a spike above"):
        warm(limit=0).judge(20, 9.0, range(4))


def test_going_back_to_a_checkpoint_does_not_give_back_what_was_spent():
    guard = warm("roll_back", limit=2)
    saved = json.loads(json.dumps(guard.state_dict()))
    for _ in range(2):
        assert guard.judge(20, math.nan, range(4)).action == "roll_back"
        guard.load_state_dict(saved)
    with pytest.raises(ToolkitError, match="already had the allowed 2 bad steps"):
        guard.judge(20, math.nan, range(4))


def with_norms(guard: LossGuard, norms: list[float]) -> list[str]:
    return [guard.judge(step, 2.0, range(4), norm).action for step, norm in enumerate(norms)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e3])
def test_a_bad_norm_is_seen_where_the_loss_is_good(bad):
    guard = LossGuard("skip")
    assert set(with_norms(guard, [1.0, 1.3, 0.8, 1.1] * 5)) == {"go_on"}
    decision = guard.judge(20, 2.0, range(80, 84), bad)
    assert decision.action == "skip" and decision.line.startswith("step 20: the gradient norm is ")
    assert guard.judge(21, 2.0, range(84, 88), 1.2).action == "go_on"


def test_norms_may_differ_by_factors_and_fall_by_any():
    """As they do in good steps, which clipping is for."""
    assert set(with_norms(LossGuard("skip"), [1.0] * 20 + [10.0])) == {"go_on"}
    assert with_norms(LossGuard("skip"), [1.0] * 20 + [12.0])[-1] == "skip", "12 is above e^(8 x 0.3), which is 11.02"
    assert set(with_norms(LossGuard("skip"), [0.0, 1e3, *[900.0 * 0.8**step for step in range(60)], 0.0])) == {"go_on"}
    assert with_norms(LossGuard("skip"), [1.0, 1e9, math.inf]) == ["go_on", "go_on", "skip"], "too few for a spike"


@given(
    losses=st.lists(st.one_of(st.floats(0.1, 10), st.sampled_from([math.nan, 1e6])), max_size=60),
    cut=st.integers(0, 60),
)
def test_a_resumed_guard_judges_as_the_uncut_one(losses, cut):
    whole = judged(LossGuard("skip", window=16, limit=99), losses)
    first = LossGuard("skip", window=16, limit=99)
    found = judged(first, losses[:cut])
    second = LossGuard("skip", window=16, limit=99)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + judged(second, losses[cut:]) == whole
