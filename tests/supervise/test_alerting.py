"""The supervisor evaluates the rules of a job, notifies, and acts."""

from __future__ import annotations

import errno
import json
import time

import pytest

from toolkit.metrics.alerts import Alert
from toolkit.metrics.verdicts import Severity, VerdictKind, clear_verdict, raise_verdict
from toolkit.metrics.windows import Statistics, Window
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.bad_nodes import bad_nodes
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_lines, write_json
from toolkit.rundir.user_requests import move_requests
from toolkit.supervise import alerting, channels, outbox
from toolkit.supervise.alerting import Alerting
from toolkit.supervise.notifier import Notifier


def window(value: float) -> Window:
    return Window(1, "n1.local", time.time(), 10.0, 1, 10, 10, {"x": Statistics(value, value, value, value, value)})


@pytest.fixture
def attempt(run_directory):
    return claim_attempt(run_directory)


@pytest.fixture
def watch(attempt):
    """An Alerting with one rule, `x > 2`; `looks` evaluates one value."""

    def make(
        attempt=attempt,
        *,
        left_s=1e6,
        job_id="local-1",
        dry_run=False,
        sender="login",
        requeue=True,
        metrics=(),
        name="high",
        **rule,
    ):
        StartRecord(0, job_id, 1, 2, "2026-11-24T00:00:00.000Z").write(attempt)
        table = {
            "when": "x > 2", "for": "0s", "cooldown": "0s", "keep_firing": "0s", "severity": "warning",
            "channels": ["log", "team"], "action": "", **rule,
        }  # fmt: skip
        job = {
            "job": {"requeue": requeue}, "restart": {"warn_s": 120}, "site": {"name": "there"},
            "alerts": {"dry_run": dry_run, "rules": {name: table}},
            "notify": {"webhook": "", "sender": sender, "channels": {"team": "slack:file:/nonexistent"}},
            "observe": {"metrics": metrics},
        }  # fmt: skip
        notifier = Notifier(attempt.run, job)
        made = Alerting(attempt, job, lambda: left_s, notifier)
        make.resolve_all = made.resolve_all

        def looks(value, verdicts=(), **more):
            made.look([] if value is None else [window(value)], [], verdicts, **more)
            notifier.wait()

        return looks

    return make


def lines(attempt) -> list[Alert]:
    path = attempt.run.metrics / "alerts.jsonl"
    return [Alert.from_line(line) for line in path.read_text().splitlines()] if path.exists() else []


def waiting(attempt) -> list[str]:
    return [json.loads(path.read_text())["text"] for path in sorted(attempt.run.outbox.glob("*.json"))]


def test_an_alert_is_recorded_logged_and_put_into_the_outbox(attempt, watch, capsys):
    looks = watch()
    for value in (None, 1.0, 3.0, 3.0, 1.0):
        looks(value)
    assert [one.state for one in lines(attempt)] == ["inactive", "firing", "resolved"]
    fired, resolved = waiting(attempt)
    name = f"sample {attempt.run.run_id}"
    assert fired == f"{name}: warning high firing: x.mean is 3 on rank 1 on node n1.local (x > 2)"
    assert resolved.startswith(f"{name}: warning high resolved: x.mean is 1")
    assert capsys.readouterr().out.count("toolkit: alert: ") == 2


def test_a_rule_without_data_is_reported_once(attempt, watch, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(alerting.time, "monotonic", lambda: now[0])
    looks = watch(when="y > 2", metrics=["y"])
    for minutes, said in ((1, 0), (6, 0), (7, 1), (8, 0), (16, 0)):
        now[0] = 60.0 * minutes
        looks(None if minutes < 7 else 1.0)
        assert (
            capsys.readouterr().out.count("rule high has no data: there is no value of y from rank 0; recorded: x")
            == said
        )
    watch()(None, is_over=True)
    assert "has no data" not in capsys.readouterr().out  # without a step, nothing else is missing
    watch(when="z > 2")(1.0, is_over=True)
    assert "there is no value of z from any rank" in capsys.readouterr().out


def test_a_notification_does_not_repeat_its_severity(attempt, watch):
    looks = watch(severity="critical", when="verdict:stall", name="critical")
    verdict = raise_verdict(VerdictKind.STALL, Severity.CRITICAL, "no step for 40 s", "look", time_s=0)
    looks(None, verdicts=[verdict])
    looks(None, verdicts=[clear_verdict(verdict, 1.0)])
    fired, resolved = waiting(attempt)
    name = f"sample {attempt.run.run_id}"
    assert fired == f"{name}: critical firing: no step for 40 s: look (verdict:stall)"
    assert resolved == f"{name}: critical resolved: no such verdict is raised (verdict:stall)"


def test_after_a_requeue_the_alert_continues_without_another_notification(attempt, watch):
    watch()(3.0)
    later = claim_attempt(attempt.run)
    looks = watch(later)
    for value in (None, 1.0, 3.0):
        looks(value)
    assert len(lines(attempt)) == len(waiting(attempt)) == 1


def test_the_end_of_the_run_resolves_what_still_fires(attempt, watch):
    watch()(3.0)
    watch()  # the process that ends the run reads the state from the file
    watch.resolve_all("completed")
    watch.resolve_all("completed")
    assert [one.state for one in lines(attempt)] == ["firing", "resolved"]
    assert waiting(attempt)[1].endswith("warning high resolved: the run has ended: completed (x > 2)")


def test_what_the_node_cannot_send_stays_for_the_login_side(attempt, watch, capsys):
    watch(sender="auto")(3.0)
    assert len(waiting(attempt)) == 1 and "cannot notify team: " in capsys.readouterr().out


def test_silences_and_acknowledgements_are_obeyed_and_damaged_ones_named(attempt, watch, capsys):
    note = {"rule": "high", "user": "ada", "acknowledged": "", "silenced_until_s": time.time() + 60}
    control = attempt.run.control / "alert-high.json"
    write_json(control, note)
    looks = watch()
    looks(3.0)
    assert lines(attempt)[-1].hidden_by == "silence" and not waiting(attempt)
    control.write_text("{torn")
    looks(3.0)
    assert lines(attempt)[-1].is_notified and "ignoring a silence" in capsys.readouterr().out


def test_damaged_lines_of_earlier_attempts_stop_nothing(attempt, watch):
    (attempt.run.metrics / "alerts.jsonl").write_text('nonsense\n{"rule": 1}\n{"torn')
    watch()(3.0)
    assert waiting(attempt)


@pytest.mark.parametrize("action", ["save", "stop"])
def test_a_request_is_made_once_and_the_events_name_the_rule(attempt, watch, action):
    looks = watch(action=action)
    for value in (3.0, 1.0, 3.0):
        looks(value)
    assert (attempt.run.control / action).exists()
    assert [one.action for one in lines(attempt)] == [action, "", f"not done: {action} was done less than 1 h ago"]
    move_requests(attempt)
    (event,) = read_lines(attempt.events)
    assert (event["event"], event["request"], event["by"]) == ("requested", action, "alert high")


def test_the_limit_of_one_action_per_hour_survives_a_restart(attempt, watch, monkeypatch):
    watch(action="save", keep_firing="0s")(3.0)
    (attempt.run.control / "save").unlink()
    monkeypatch.setattr("toolkit.metrics.alerts.SETTLE_S", 0.0)
    looks = watch(claim_attempt(attempt.run), action="save")
    looks(1.0)
    looks(3.0)
    assert lines(attempt)[-1].action.startswith("not done") and not (attempt.run.control / "save").exists()


@pytest.mark.parametrize(
    ("case", "action"),
    [
        ({"left_s": 100.0}, "not done: the walltime is nearer than restart.warn_s"),
        ({"dry_run": True}, "dry run: stop"),
        ({"is_over": True}, "not done: the attempt is over"),
        ({"action": "requeue"}, "not done: the job cannot be requeued"),
        ({"action": "requeue", "job_id": "7", "requeue": False}, "not done: the job cannot be requeued"),
        ({"action": "exclude_node"}, "not done: the alert names no node of Slurm"),
    ],
)
def test_actions_that_are_not_performed(attempt, watch, case, action):
    more = {"is_over": True} if case.pop("is_over", False) else {}
    watch(**{"action": "stop", **case})(3.0, **more)
    assert [one.action for one in lines(attempt)] == [action]
    assert list(attempt.run.control.iterdir()) == []


def test_a_slow_node_is_excluded(attempt, watch):
    watch(action="exclude_node", job_id="7")(3.0)
    (bad,) = bad_nodes(attempt.run.path.parents[1], "there")
    assert (bad.node, bad.run_id) == ("n1", attempt.run.run_id) and "x.mean is 3" in bad.reason


def test_a_requeue_goes_to_slurm_and_explain_knows_it(attempt, watch, fake_slurm):
    fake_slurm.respond("scontrol")
    watch(action="requeue", job_id="7")(3.0)
    assert "requeue Incomplete 7" in " ".join(fake_slurm.calls("scontrol"))
    assert (attempt.run.control / "requeue").read_text().endswith("Z\n") and lines(attempt)[0].action == "requeue"


def test_slurm_may_refuse_a_requeue(attempt, watch, fake_slurm):
    fake_slurm.respond("scontrol", code=1)
    watch(action="requeue", job_id="7")(3.0)
    assert lines(attempt)[0].action.startswith("not done: ")


def test_on_a_full_disk_a_notification_is_posted_at_once(attempt, watch, monkeypatch, capsys):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    posted = []
    monkeypatch.setattr(outbox, "write_json", full)
    for module in (alerting, channels):
        monkeypatch.setattr(module, "post", lambda channel, *_: posted.append(channel))
    watch()(3.0)
    assert posted == ["log", "team"] and "cannot write a notification for team: No space" in capsys.readouterr().out
