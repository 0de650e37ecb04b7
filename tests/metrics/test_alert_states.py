"""The states of alerts, on random sequences of readings."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.metrics.alert_rules import Reading, Rule
from toolkit.metrics.alerts import SETTLE_S, Alert, AlertMachine, AlertState
from toolkit.metrics.records import read_records
from toolkit.metrics.verdicts import Severity

TRUE, FALSE = Reading(True, 3.0, "x is 3", "x", (1,), "n1"), Reading(False, 1.0, "x is 1", "x", (1,), "n1")
STEPS = st.lists(st.tuples(st.floats(0.1, 100.0), st.sampled_from([TRUE, FALSE, None]), st.booleans()), max_size=60)
DURATION = st.sampled_from([0.0, 5.0, 30.0, 120.0])
RULES = st.builds(lambda wait, cool, keep: Rule("r", "x > 2", wait, cool, keep), DURATION, DURATION, DURATION)


def play(machine: AlertMachine, steps, now_s: float = 1000.0):
    """Yield (time, reading, changes) of each step."""
    for pause_s, reading, is_silenced in steps:
        now_s += pause_s
        yield now_s, reading, machine.evaluate({"r": reading}, now_s, {"r"} if is_silenced else ())


@given(RULES, STEPS)
def test_an_alert_fires_only_after_its_time_and_cooldown(rule, steps):
    machine, met_since, resolved_s = AlertMachine([rule]), None, -1e9
    for now_s, reading, changes in play(machine, steps):
        met_since = (now_s if met_since is None else met_since) if reading is TRUE else None
        for alert in changes:
            if alert.state is AlertState.FIRING and not alert.is_notified and alert.hidden_by:
                assert alert.hidden_by == "silence"
            if alert.state is AlertState.RESOLVED:
                resolved_s = now_s
        alert = machine.latest["r"]
        if alert.state is AlertState.FIRING and alert.began_s > resolved_s and reading is TRUE and changes:
            assert now_s - alert.began_s >= rule.for_s and now_s - resolved_s >= rule.cooldown_s
        if alert.state is AlertState.PENDING:
            assert reading is TRUE and now_s - met_since < max(rule.for_s, rule.cooldown_s)


def test_a_verdict_of_another_kind_notifies_again_and_one_of_a_known_kind_does_not():
    machine = AlertMachine([Rule("r", "verdict:*")])
    kinds = ("straggler", "memory_leak", "straggler", "memory_leak")
    found = [
        machine.evaluate({"r": Reading(True, 1.0, kind, kind, (1,), "n1")}, 1000.0 + number)
        for number, kind in enumerate(kinds)
    ]
    assert [[alert.subject for alert in changes] for changes in found] == [["straggler"], ["memory_leak"], [], []]
    machine.evaluate({"r": FALSE}, 2000.0)
    (again,) = machine.evaluate({"r": Reading(True, 1.0, "", "straggler", (1,), "n1")}, 3000.0)
    assert again.is_notification


def test_what_was_notified_is_resolved_although_a_later_kind_is_silenced():
    machine = AlertMachine([Rule("r", "verdict:*")])
    for number, kind in enumerate(("straggler", "memory_leak")):
        machine.evaluate({"r": Reading(True, 1.0, kind, kind)}, 1000.0 + number, {"r"} if number else ())
    (resolved,) = machine.evaluate({"r": FALSE}, 2000.0)
    assert resolved.state is AlertState.RESOLVED and resolved.is_notification


@given(RULES, STEPS)
def test_an_alert_is_resolved_only_after_the_condition_was_over_long_enough(rule, steps):
    machine, met_s = AlertMachine([rule]), 0.0
    for now_s, reading, changes in play(machine, steps):
        met_s = now_s if reading is TRUE else met_s
        for alert in changes:
            if alert.state is AlertState.RESOLVED:
                assert reading is FALSE and now_s - met_s >= rule.keep_firing_s
        if machine.latest["r"].state is AlertState.FIRING and reading is FALSE:
            assert now_s - met_s < rule.keep_firing_s


@given(RULES, STEPS)
def test_each_alert_notifies_once_when_it_fires_and_once_when_it_is_resolved(rule, steps):
    machine, notified = AlertMachine([rule]), []
    for _, _, changes in play(machine, steps):
        notified += [(alert.key, alert.state) for alert in changes if alert.is_notification]
    assert len(notified) == len(set(notified))
    for place, (key, state) in enumerate(notified):
        assert state is AlertState.FIRING or (key, AlertState.FIRING) in notified[:place]


@given(RULES, STEPS, st.lists(st.integers(0, 60), max_size=4))
def test_a_restart_at_any_time_sends_nothing_twice(rule, steps, restarts):
    """The lines that were written are all that the next attempt knows."""
    machine, lines, now_s = AlertMachine([rule]), [], 1000.0
    for number, step in enumerate(steps):
        if number in restarts:
            machine = AlertMachine([rule], attempt=1, earlier=map(Alert.from_line, lines), now_s=now_s)
        ((now_s, _, changes),) = play(machine, [step], now_s)
        lines += [alert.to_line() for alert in changes]
    keys = [(alert.key, alert.state) for alert in map(Alert.from_line, lines) if alert.is_notification]
    assert len(keys) == len(set(keys))


def test_a_resolved_alert_names_the_ranks_that_fired_and_no_other_one():
    machine = AlertMachine([Rule("r", "x > 2")])
    (fired,) = machine.evaluate({"r": Reading(True, 3.0, "x is 3", "x", (1,), "n1", " on rank 1 on node n1")}, 0.0)
    assert fired.message == "x is 3 on rank 1 on node n1"
    assert machine.evaluate({"r": Reading(True, 4.0, "x is 4", "x", (2,), "n2", " on rank 2 on node n2")}, 1.0) == []
    (over,) = machine.evaluate({"r": Reading(False, 1.0, "x is 1", "x", (5,), "n5", " on rank 5 on node n5")}, 2.0)
    assert (over.state, over.message, over.ranks, over.host) == (AlertState.RESOLVED, "x is 1", (1,), "n1")


@given(RULES, STEPS)
def test_without_data_nothing_ever_fires(rule, steps):
    machine = AlertMachine([rule])
    for _, _, changes in play(machine, [(pause, None, silenced) for pause, _, silenced in steps]):
        assert changes == []
    assert machine.latest["r"].state is AlertState.NO_DATA


def test_an_alert_of_an_earlier_attempt_stays_until_verdicts_had_time():
    machine = AlertMachine([Rule("r", "x > 2")])
    (fired,) = machine.evaluate({"r": TRUE}, 0.0)
    later = AlertMachine([Rule("r", "x > 2")], attempt=1, earlier=[fired], now_s=100.0)
    assert later.evaluate({"r": None}, 101.0) == later.evaluate({"r": FALSE}, 100.0 + SETTLE_S - 1) == []
    (resolved,) = later.evaluate({"r": FALSE}, 100.0 + SETTLE_S)
    assert (resolved.state, resolved.key, resolved.attempt) == (AlertState.RESOLVED, fired.key, 1)


def test_a_silence_or_an_acknowledgement_keeps_an_alert_quiet_and_the_end_of_a_silence_notifies():
    machine = AlertMachine([Rule("r", "x > 2")])
    (hidden,) = machine.evaluate({"r": TRUE}, 0.0, silenced={"r"})
    assert (hidden.state, hidden.hidden_by, hidden.is_notification) == (AlertState.FIRING, "silence", False)
    (known,) = machine.evaluate({"r": TRUE}, 1.0, acknowledged={hidden.key})
    assert known.hidden_by == "acknowledgement" and not known.is_notification
    (fired,) = machine.evaluate({"r": TRUE}, 2.0)
    assert fired.is_notification and fired.key == hidden.key
    assert machine.evaluate({"r": TRUE}, 3.0, silenced={"r"}) == []


@pytest.mark.parametrize(
    ("first", "second", "is_hidden"),
    [
        (("stall", "warning", ()), ("tokens_per_s", "critical", ()), True),
        (("stall", "warning", ()), ("throughput_drop", "warning", (1,)), True),
        (("stall", "warning", ()), ("loss_spike", "warning", ()), False),
        (("step_s", "critical", (3,)), ("work_s", "warning", (3,)), True),
        (("step_s", "critical", (3,)), ("work_s", "warning", (2,)), False),
        (("step_s", "critical", ()), ("work_s", "warning", ()), False),
        (("step_s", "critical", ()), ("step_s", "warning", ()), True),
        (("step_s", "warning", (3,)), ("work_s", "warning", (3,)), False),
    ],
)
def test_inhibition(first, second, is_hidden):
    rules = [
        Rule(name, "x > 2", severity=Severity(severity)) for name, (_, severity, _) in (("a", first), ("b", second))
    ]
    readings = {
        name: Reading(True, 1.0, "", subject, ranks) for name, (subject, _, ranks) in (("a", first), ("b", second))
    }
    a, b = AlertMachine(rules).evaluate(readings, 0.0)
    assert a.is_notification and b.is_notification == (not is_hidden) and b.hidden_by == ("a" if is_hidden else "")


def test_damaged_lines_are_named(tmp_path):
    line = json.loads(Alert("r", time="2026-11-24T00:00:00.000Z").to_line())
    path = tmp_path / "alerts.jsonl"
    for damage in ({"state": "on"}, {"severity": "bad"}, {"ranks": 3}, {"began_s": "x"}, {"time": "now"}, {"other": 1}):
        path.write_text(json.dumps(line) + "\n" + json.dumps({**line, **damage}) + "\n")
        with pytest.raises(Exception, match=r"alerts\.jsonl:2: not a rule state"):
            list(read_records(path, Alert.from_line, what="rule state"))
