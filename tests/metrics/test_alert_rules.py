"""Conditions of alert rules: what they accept, and the worst rank."""

from __future__ import annotations

import math
import operator
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.metrics.alert_rules import Readings, Rule, parse_condition, window_of
from toolkit.metrics.training import TrainRecord
from toolkit.metrics.verdicts import Severity, VerdictKind, clear_verdict, raise_verdict
from toolkit.metrics.windows import Statistics, Window

OPERATORS = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
FINITE = st.floats(-1e6, 1e6)


def window(rank: int, value: float, began_s: float = 0.0, name: str = "x") -> Window:
    return Window(
        rank, f"n{rank}", began_s, 10.0, 1, 10, 10, {name: Statistics(value, value - 1, value + 1, value, value)}
    )


def reading(when: str, *windows: Window):
    return Readings([Rule("r", when)]).update(windows, [])["r"]


@given(
    st.from_regex(r"[a-z][a-z_0-9/-]{0,20}", fullmatch=True), st.sampled_from(["", ".mean", ".min", ".max", ".p95"]),
    st.sampled_from(sorted(OPERATORS)), FINITE, st.sampled_from(["", " ", "  "]),
)  # fmt: skip
def test_each_form_of_a_condition_on_a_metric_is_read_back(name, statistic, sign, limit, space):
    found = parse_condition(f"{name}{statistic}{space}{sign}{space}{limit!r}")
    assert (found.subject, found.statistic) == (name, statistic[1:] or "mean")
    assert (found.operator, found.limit, found.severity) == (sign, limit, None)


@given(st.text(max_size=40))
def test_any_other_string_is_rejected(text):
    try:
        found = parse_condition(text)
    except ValueError as error:
        assert str(error).startswith(f"{text!r} is not a valid condition")
    else:
        assert found.operator in OPERATORS


@pytest.mark.parametrize(
    "text",
    [
        "", "step_s", "step_s >", "> 2", "step_s > two", "step_s => 2", "step_s = 2", "step_s > 2 s", "step_s.p99 >",
        "rate(step_s) > 2", "rate(step_s, 60) > 2", "rate(step_s, 0s) > 2", "verdict:", "verdict:slow", "verdict:stall > info",
        "verdict:* >= fatal", "step_s.p99 > 2", "rate(loss.mean, 60s) > 2", "a b > 2", "step_s > nan", "step_s > 2 or loss > 3",
    ],
)  # fmt: skip
def test_conditions_that_are_rejected(text):
    with pytest.raises(ValueError, match="is not a valid condition"):
        parse_condition(text)


def test_a_metric_of_the_program_may_end_like_a_statistic():
    assert parse_condition("queue.count > 2").subject == "queue.count"


@given(st.lists(FINITE, min_size=1, max_size=8), st.sampled_from(sorted(OPERATORS)), FINITE)
def test_a_condition_is_met_if_one_rank_meets_it_and_that_rank_is_named(values, sign, limit):
    found = reading(f"x {sign} {limit!r}", *(window(rank, value) for rank, value in enumerate(values)))
    met = [rank for rank, value in enumerate(values) if OPERATORS[sign](value, limit)]
    assert found is not None and found.is_met == bool(met)
    if found.ranks:
        (worst,) = found.ranks
        assert worst in met or not met
    else:  # it is like the others
        assert len(values) > 1 and math.isclose(found.value, statistics.median(values), rel_tol=0.2, abs_tol=1e-9)
    if sign[0] in "<>":
        assert found.value == (min if sign[0] == "<" else max)(values)


def test_a_metric_without_data_has_no_reading_and_nan_is_none():
    assert reading("y > 0", window(0, 1.0)) is None
    assert reading("x > 0", window(0, math.nan)) is None
    assert reading("x > 0", window(0, math.nan), window(1, math.inf)).ranks == (1,)


def test_the_newest_window_counts_whatever_the_order_and_also_if_a_later_one_lacks_the_metric():
    found = reading("x > 0", window(0, 5.0, 20.0), window(0, 9.0, 10.0), window(0, 7.0, 30.0, "other"))
    assert (found.value, found.message, found.place) == (5.0, "x.mean is 5", " on rank 0 on node n0")
    assert reading("x.max > 0", window(0, 5.0)).message == "x.max is 6"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((0.21075, 0.21078), ()),
        ((0.2, 0.3), (1,)),
        ((0.3, 0.2, 0.2, 0.2), (0,)),
        ((2.0, 2.0, 2.0, 2.01), ()),
        ((2.0,), (0,)),
    ],
)
def test_no_rank_is_named_if_all_are_alike(values, named):
    found = reading("x > 0.1", *(window(rank, value) for rank, value in enumerate(values)))
    assert (found.is_met, found.ranks, bool(found.place), found.value) == (True, named, bool(named), max(values))


def test_a_declared_metric_is_that_of_rank_0_or_the_mean_over_ranks():
    windows = [window(rank, value, name="acc") for rank, value in enumerate((1.0, 2.0, 6.0))]
    for declared, value in (({"acc": False}, 1.0), ({"acc": True}, 3.0), ({}, 6.0)):
        found = Readings([Rule("r", "acc > 0")], declared).update(windows, [])["r"]
        assert (found.value, found.ranks) == (value, () if declared else (2,))
    assert Readings([Rule("r", "acc > 0")], {"acc": False}).update(windows[1:], [])["r"] is None
    training = Window(-1, "", 0.0, 0.0, 1, 1, 1, {"acc": Statistics(9.0, 9.0, 9.0, 9.0, 9.0)})
    for is_mean in (True, False):
        found = Readings([Rule("r", "acc > 0")], {"acc": is_mean}).update([*windows, training], [])["r"]
        assert found.value == 9.0


def test_a_rate_is_the_change_per_second_over_its_whole_window():
    readings = Readings([Rule("r", "rate(x, 30s) > 1")])
    for slot in range(3):
        assert readings.update([window(0, 20.0 * slot, 10.0 * slot)], [])["r"] is None
    for slot in range(3, 9):
        found = readings.update([window(0, 20.0 * slot, 10.0 * slot)], [])["r"]
        assert (found.is_met, found.value) == (True, 2.0)
    assert readings.update([window(0, 160.0, 90.0)], [])["r"].value == pytest.approx(40 / 30)


def test_records_of_the_training_are_metrics_of_no_rank():
    record = TrainRecord(5, 9, 2.5, (2.5).hex(), 0.1, math.nan, 5, 5, 0.1, 100.0, "2026-11-24T00:00:00.000+00:00", 0, 4)
    assert window_of([]) == []
    found = reading("tokens_per_s < 200", *window_of([record]))
    assert (found.is_met, found.ranks, found.message) == (True, (), "tokens_per_s.mean is 100")
    assert reading("mfu < 1", *window_of([record])) is None and reading("grad_norm < 1", *window_of([record])) is None


def test_raised_verdicts_of_the_kind_and_severity_count_until_they_are_cleared():
    slow = raise_verdict(VerdictKind.STRAGGLER, Severity.WARNING, "slow", "fix", time_s=0, ranks=[3], host="n1")
    stall = raise_verdict(VerdictKind.STALL, Severity.CRITICAL, "stall", "fix", time_s=0)
    readings = Readings(
        [Rule("any", "verdict:*"), Rule("bad", "verdict:* >= critical"), Rule("one", "verdict:straggler")]
    )
    assert not any(one.is_met for one in readings.update([], []).values())
    found = readings.update([], [slow])
    assert {name: one.is_met for name, one in found.items()} == {"any": True, "bad": False, "one": True}
    assert (found["any"].ranks, found["any"].host, found["any"].subject) == ((3,), "n1", "straggler")
    found = readings.update([], [stall])
    assert found["any"].subject == found["bad"].subject == "stall" and found["any"].value == 2
    found = readings.update([], [clear_verdict(slow, 1.0), clear_verdict(stall, 1.0)])
    assert not any(one.is_met for one in found.values())
