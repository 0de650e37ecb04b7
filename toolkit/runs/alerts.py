"""Read the alerts of a run, quiet them, send those that wait, and replay rules on what a run recorded."""

import os
import time
from collections.abc import Collection, Iterable
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from toolkit.config.table import nearest
from toolkit.errors import CheckFailedError, NotFoundError
from toolkit.metrics.alert_rules import Readings, Rule, rules_of, window_of
from toolkit.metrics.alerts import Alert, AlertMachine, AlertState
from toolkit.metrics.records import read_records
from toolkit.metrics.verdicts import Verdict
from toolkit.metrics.windows import Window
from toolkit.observe.readings import RunReadings
from toolkit.rundir.files import read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.user_requests import user_name
from toolkit.runs.record.job import recorded_job
from toolkit.supervise.outbox import send_outbox
from toolkit.terminal.talk import say

__all__ = ["all_alerts", "latest_alerts", "quiet", "replay", "send_alerts", "send_all", "who_quieted"]


def all_alerts(run: RunDirectory) -> list[Alert]:
    """Return all changes of the alerts of a run or task, oldest first; ToolkitError if the file is damaged."""
    path = run.metrics / "alerts.jsonl"
    return list(read_records(path, Alert.from_line, what="alert")) if path.exists() else []


def latest_alerts(run: RunDirectory) -> dict[str, Alert]:
    """Return the newest state of each rule of the job; `hidden_by` is a silence or acknowledgement that applies now."""
    rules = rules_of(recorded_job(run).model_dump(mode="json", by_alias=True))
    found = {rule.name: Alert(rule.name, severity=rule.severity, message=rule.when) for rule in rules}
    return found | {alert.rule: alert for alert in all_alerts(run) if alert.rule in found}


def quiet(run: RunDirectory, rule: str, *, silenced_until_s: float | None, comment: str = "") -> None:
    """Silence a rule until a time, or acknowledge its alert if that is None.

    Raises:
        NotFoundError: the run has no such rule.
        CheckFailedError: there is no alert to acknowledge.
    """
    known = latest_alerts(run)
    if rule not in known:
        named = ", ".join(nearest(rule, known) or known) or "a job with [alerts.rules]"
        raise NotFoundError(f"rule {rule!r} not found", where=str(run.path), fix=f"use {named}")
    alert, path = known[rule], run.control / f"alert-{rule}.json"
    if silenced_until_s is None and alert.state is not AlertState.FIRING:
        fix = f"`toolkit alerts {run.run_id}` shows the alerts"
        raise CheckFailedError(f"rule {rule} is {alert.state}, not firing", where=str(run.path), fix=fix)
    old: dict[str, Any] = read_json_or_none(path) or {"silenced_until_s": 0, "acknowledged": ""}
    new = {"acknowledged": alert.key} if silenced_until_s is None else {"silenced_until_s": silenced_until_s}
    write_json(path, {**old, **new, "rule": rule, "user": user_name(), "time": utc_now(), "comment": comment})


def who_quieted(run: RunDirectory, alert: Alert) -> str:
    """Return who silenced the rule or acknowledged its alert, or the rule that hides it; "" if nothing does."""
    value: dict[str, Any] = read_json_or_none(run.control / f"alert-{alert.rule}.json") or {}
    if value.get("silenced_until_s", 0) > time.time():
        return f"silenced by {value['user']} until {datetime.fromtimestamp(value['silenced_until_s']):%Y-%m-%d %H:%M}"
    is_acknowledged = value.get("acknowledged") == alert.key
    return f"acknowledged by {value['user']}" if is_acknowledged else alert.hidden_by


def send_alerts(run: RunDirectory) -> int:
    """Send the notifications of a run that wait in its outbox; return how many. Failures are reported."""
    if not os.access(run.outbox, os.W_OK):  # there is none, or it belongs to another user
        return 0
    notify = recorded_job(run).notify.model_dump(mode="json")
    return send_outbox(run, notify, say) if notify["sender"] != "node" else 0


def send_all(folders: Iterable[Path]) -> int:
    """Send the notifications of all runs and tasks below folders of runs; return how many."""
    found = {
        path for one in folders for below in ("*/*", "*/*/tasks/*") for path in one.glob(f"{below}/alerts/outbox/*")
    }
    return sum(send_alerts(RunDirectory(path)) for path in sorted({path.parents[2] for path in found}))


def replay(rules: Collection[Rule], run: RunDirectory) -> list[Alert]:
    """Return the changes that rules would have caused in the last attempt of a run, without silences."""
    recorded = RunReadings(run)
    recorded.update()
    training = [window_of([record]) for record in recorded.training if record.attempt == recorded.attempt]
    found: list[tuple[float, Window | Verdict]] = [
        (one.began_s + one.seconds, one) for windows in (*recorded.windows.values(), *training) for one in windows
    ]
    found += [
        (datetime.fromisoformat(one.time).timestamp(), one)
        for one in recorded.verdicts
        if one.attempt == recorded.attempt
    ]
    readings, machine, changes = Readings(rules), AlertMachine(rules), list[Alert]()
    for time_s, together in groupby(sorted(found, key=lambda one: one[0]), key=lambda one: one[0]):
        new = [one for _, one in together]
        of_ranks, verdicts = (
            [one for one in new if isinstance(one, Window)],
            [one for one in new if isinstance(one, Verdict)],
        )
        changes += machine.evaluate(readings.update(of_ranks, verdicts), time_s)
    return changes
