"""`toolkit alerts`, and an alert of a real run from its rank to the receivers."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from receivers import http_receiver, mail_receiver

from toolkit.metrics.alerts import Alert, AlertLog, AlertState
from toolkit.rundir.files import read_lines
from toolkit.supervise.outbox import put

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/run-directory.schema.json").read_text())
LOOP = """
import time
import toolkit
from toolkit.world.discover import discover
world = discover()
for n in range(1, 40):
    time.sleep(0.05)
    toolkit.record("data_s", n if world.rank == 1 else 0.0)
    toolkit.record("reward", n + 10 * world.rank)
    toolkit.step(n)
"""
RULES = """
[alerts.rules.high]
when = "data_s.max > 20"
severity = "critical"
channels = ["log", "hook", "me"]
[alerts.rules.never]
when = "nonsense > 3"
[alerts.rules.own]
when = "reward.max > 20"
[observe]
metrics = ["reward:mean", "nonsense"]
[alerts.rules.slow]
when = "step_s.p95 > 60"
for = "60s"
"""


def check_schema(name: str, value: Any) -> None:
    jsonschema.validate(value, {**SCHEMA, "$ref": f"#/$defs/{name}"})


@pytest.fixture
def receiver():
    with http_receiver() as server:
        yield server


@pytest.fixture
def job(toolkit, receiver):
    """A job file of two ranks of which rank 1 exceeds a limit."""
    (toolkit.folder / "url").write_text(receiver.url)
    (toolkit.folder / "url").chmod(0o600)
    (toolkit.folder / "loop.py").write_text(LOOP)

    def write(notify="", rules=RULES, name="loop", entry='"loop.py"\nranks_per_node = 2'):
        path = toolkit.folder / f"{name}.toml"
        channels = f'hook = "webhook:file:{toolkit.folder}/url"\nme = "mail:me@example.org"\n'
        head = f'[job]\nentry = {entry}\n[notify]\nmail_from = "it@example.org"\n{notify}\n'
        path.write_text(f"{head}[notify.channels]\n{channels}{rules}")
        return path

    return write


def test_an_alert_of_a_rank_reaches_mail_and_webhook(toolkit, job, receiver):
    with mail_receiver() as (server, received):
        toolkit.ok("run", job(f'smtp = "{server}"'))
    (message, _), ((_, posted), (_, resolved)) = received, receiver.got
    assert (resolved["state"], resolved["key"]) == ("resolved", posted["key"])  # the run has ended
    assert (posted["rule"], posted["state"], posted["ranks"]) == ("high", "firing", [1]) and posted["value"] > 20
    assert posted["text"] in " ".join(str(message["Subject"]).split())
    run = toolkit.run(posted["run_id"])
    assert sorted(path.suffixes[-2] for path in (run.path / "alerts/sent").iterdir()) == [".hook"] * 2 + [".me"] * 2
    log = "".join(path.read_text() for path in run.path.glob("slurm-*.out"))
    name = f"toolkit: alert: loop {run.run_id}:"
    assert re.search(
        rf"^{name} critical high firing: data_s.max is \d+ on rank 1 on node \S+ \(data_s.max > 20\)$", log, re.M
    )
    assert re.search(rf"^{name} warning own firing: reward.max is [\d.]+ \(reward.max > 20\)$", log, re.M)
    (line,) = [one for one in log.splitlines() if "has no data" in one]
    assert "rule never has no data: there is no value of nonsense from rank 0; recorded: " in line and "reward" in line
    rows = json.loads(toolkit.ok("alerts", "--json"))
    assert [(row["rule"], row["state"]) for row in rows] == [
        ("high", "resolved"), ("never", "no_data"), ("own", "resolved"), ("slow", "inactive"),
    ]  # fmt: skip
    for line in (run.metrics / "alerts.jsonl").read_text().splitlines():
        check_schema("alert", json.loads(line))


@pytest.fixture
def recorded(toolkit, job):
    """A run that recorded nothing, with alerts as a supervisor would have written them."""
    run = toolkit.submit(job('sender = "login"', entry='["true"]'))
    toolkit("wait", run.run_id)
    for path in (run.metrics / "alerts.jsonl", *run.outbox.glob("*")):
        path.unlink(missing_ok=True)

    def write(*alerts: Alert):
        with AlertLog(run.metrics / "alerts.jsonl") as log:
            for one in alerts:
                log.write(one)
        return run

    return write


def alert(rule: str, state: str, began_s: float = 5.0, time: str = "2026-11-24T00:00:00.000Z", **more) -> Alert:
    return Alert(rule, AlertState(state), began_s=began_s, time=time, message=f"{rule} is {state}", **more)


def test_history_and_stats_select_and_count(toolkit, recorded):
    recorded(
        alert("high", "pending"), alert("high", "firing"), alert("high", "resolved"), alert("high", "firing", 9.0),
        alert("slow", "firing", time="2020-01-01T00:00:00.000Z"),
    )  # fmt: skip
    assert len(json.loads(toolkit.ok("alerts", "history", "--json"))) == 5
    assert [row["rule"] for row in json.loads(toolkit.ok("alerts", "history", "--rule", "slow", "--json"))] == ["slow"]
    assert json.loads(toolkit.ok("alerts", "history", "--severity", "critical", "--json")) == []
    assert "slow" not in toolkit.ok("alerts", "history", "--since", "2026-01-01")
    assert json.loads(toolkit.ok("alerts", "history", "--rule", "never", "--json")) == []
    refused = toolkit("alerts", "history", "--rule", "nope")
    assert refused.code == 4 and "rule 'nope' not found" in refused.err and "use high, never, own, slow" in refused.err
    assert json.loads(toolkit.ok("alerts", "stats", "--json")) == [
        {"rule": "high", "severity": "warning", "count": 2}, {"rule": "slow", "severity": "warning", "count": 1},
    ]  # fmt: skip


def test_a_user_silences_acknowledges_and_sees_both(toolkit, recorded):
    run = recorded(alert("high", "firing"))
    assert "rule high: silenced until 20" in toolkit.ok(
        "alerts", "silence", "high", "--for", "2h", "--comment", "known"
    )
    (control,) = run.control.glob("alert-*.json")
    value = json.loads(control.read_text())
    check_schema("alert_request", value)
    assert value["comment"] == "known" and 7100 < value["silenced_until_s"] - time.time() <= 7200
    assert "silenced by " in toolkit.ok("alerts", "list", run.run_id)
    toolkit.ok("alerts", "ack", "high", run.run_id)
    toolkit.ok("alerts", "unsilence", "high")
    assert "acknowledged by " in toolkit.ok("alerts")
    refused = toolkit("alerts", "ack", "slow")
    assert refused.code == 1 and "rule slow is no_data, not firing" in refused.err
    refused = toolkit("alerts", "silence", "hihg", "--for", "2h")
    assert refused.code == 4 and "rule 'hihg' not found. Fix: use high" in refused.err
    assert toolkit("alerts", "silence", "high").code == toolkit("alerts", "silence", "high", "--for", "x").code == 2


def test_the_login_side_sends_what_waits(toolkit, recorded, receiver):
    run = recorded()
    put(run, "hook", {"text": "hello", "run_id": run.run_id, "key": "k", "state": "firing"})
    receiver.status = 500
    failed = toolkit("alerts", "send")
    assert (failed.code, failed.out) == (
        1,
        "sent: 0, waiting: 1\n",
    ) and "cannot notify hook: notify.channels.hook: webhook did not accept it" in failed.err
    receiver.status = 200
    assert toolkit.ok("alerts", "send", run.run_id) == "sent: 1, waiting: 0\n"
    assert toolkit.ok("alerts", "send") == "sent: 0, waiting: 0\n"
    assert [body["text"] for _, body in receiver.got] == ["hello", "hello"]


def test_a_channel_can_be_tested_before_the_first_run(toolkit, job, receiver):
    path = job('smtp = "smtp://127.0.0.1:9"')
    assert toolkit.ok("alerts", "test", "hook", path) == "hook accepted a test message\n"
    assert receiver.got[0][1]["event"] == "test"
    refused = toolkit("alerts", "test", "me", path)
    assert refused.code == 125 and "mail did not accept it: Connection refused" in refused.err
    refused = toolkit("alerts", "test", "hok", path)
    assert refused.code == 4 and "channel 'hok' not found" in refused.err


def test_rules_of_a_job_file_are_checked(toolkit, job):
    path = job(rules=RULES + 'keep_firing = "0s"\n', name="other")
    rows = json.loads(toolkit.ok("alerts", "check", path, "--json"))
    assert [row["name"] for row in rows] == ["high", "never", "own", "slow"] and rows[3]["for_s"] == 60
    assert rows[0]["condition"]["limit"] == 20
    refused = toolkit("alerts", "check", job(rules=RULES.replace("data_s.max > 20", "reward > high"), name="bad"))
    assert refused.code == 2 and "alerts.rules.high.when" in refused.err


def test_a_rule_on_a_metric_that_nothing_records_is_refused_with_the_nearest_name(toolkit, job):
    path = job(rules='[alerts.rules.a]\nwhen = "lossy > 2"\n[alerts.rules.b]\nwhen = "rewrd > 2"\n'
               '[observe]\nmetrics = ["reward:mean"]\n')  # fmt: skip
    for command in (("alerts", "check"), ("submit",), ("run",)):
        refused = toolkit(*command, path)
        assert refused.code == 2 and "alerts.rules.a.when: metric 'lossy' not found. Fix: use loss;" in refused.err
        assert "metric 'rewrd' not found. Fix: use reward;" in refused.err
        assert 'add "rewrd" or "rewrd:mean" to observe.metrics' in refused.err
    run = toolkit.submit(job(entry='["true"]', name="later"))
    toolkit("wait", run.run_id)
    refused = toolkit("resume", run.run_id, "--set", "alerts.rules.high.when=data > 2", "--set", "train.steps=9")
    assert refused.code == 2 and "metric 'data' not found. Fix: use data_s;" in refused.err


def test_damaged_alerts_are_named_with_their_line(toolkit, recorded):
    run = recorded(alert("high", "firing"))
    with (run.metrics / "alerts.jsonl").open("a") as stream:
        stream.write("nonsense\n")
    for command in (("list",), ("history",), ("stats",)):
        refused = toolkit("alerts", *command)
        assert refused.code == 2 and "alerts.jsonl:2: not a rule state record" in refused.err


def test_a_run_without_rules_has_none(toolkit):
    toolkit.submit(toolkit.job("true"))
    assert "no table [alerts.rules.NAME]" in toolkit.ok("alerts")
    assert "no alert has changed" in toolkit.ok("alerts", "history")


def test_who_stopped_a_run_is_in_its_events(toolkit, wait_until):
    run = toolkit.submit(toolkit.job("sleep 60"))
    wait_until(lambda: any(run.attempts.glob("*/events.jsonl")))
    toolkit.ok("cancel", run.run_id)
    toolkit("wait", run.run_id)
    (event,) = [one for one in read_lines(run.last_attempt().events) if one["event"] == "requested"]
    assert (event["request"], event["by"]) == ("cancel", "toolkit cancel") and event["user"]
