"""Read the alerts of a run, quiet them, and send those that wait."""

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.config.table import nearest
from toolkit.errors import CheckFailedError, NotFoundError
from toolkit.metrics.alert_rules import rules_of
from toolkit.metrics.alerts import Alert, AlertState
from toolkit.metrics.records import read_records
from toolkit.rundir.files import read_json_or_none, utc_now, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.user_requests import user_name
from toolkit.runs.record.job import recorded_job
from toolkit.supervise.outbox import send_outbox
from toolkit.terminal.talk import say

__all__ = ["all_alerts", "latest_alerts", "quiet", "require_rule", "runs_to_send", "send_alerts"]


def all_alerts(run: RunDirectory) -> list[Alert]:
    """Return all changes of the alerts of a run or task, oldest first; ToolkitError if the file is damaged."""
    path = run.metrics / "alerts.jsonl"
    return list(read_records(path, Alert.from_line, what="rule state")) if path.exists() else []


def latest_alerts(run: RunDirectory) -> dict[str, Alert]:
    """Return the newest state of each rule of the job; `hidden_by` is also who silenced or acknowledged it now."""
    rules = rules_of(recorded_job(run).model_dump(mode="json", by_alias=True))
    found = {rule.name: Alert(rule.name, severity=rule.severity, message=rule.when) for rule in rules}
    found |= {alert.rule: alert for alert in all_alerts(run) if alert.rule in found}
    return {name: replace(alert, hidden_by=_quieted(run, alert) or alert.hidden_by) for name, alert in found.items()}


def _quieted(run: RunDirectory, alert: Alert) -> str:
    for folder in (run.control, run.whole.control):
        value: dict[str, Any] = read_json_or_none(folder / f"alert-{alert.rule}.json") or {}
        if value.get("silenced_until_s", 0) > time.time():
            until = datetime.fromtimestamp(value["silenced_until_s"])
            return f"silenced by {value['user']} until {until:%Y-%m-%d %H:%M}"
        if value.get("acknowledged") == alert.key:
            return f"acknowledged by {value['user']}"
    return ""


def quiet(run: RunDirectory, rule: str, silenced_until_s: float | None, comment: str = "") -> None:
    """Silence a rule until a time, or acknowledge its alert if that is None.

    Raises:
        NotFoundError: the run has no such rule.
        CheckFailedError: there is no alert to acknowledge.
    """
    known, path = latest_alerts(run), run.control / f"alert-{rule}.json"
    require_rule(run, rule, known)
    if silenced_until_s is None and known[rule].state is not AlertState.FIRING:
        fix = f"`toolkit alerts {run.run_id}` shows the alerts"
        raise CheckFailedError(f"rule {rule} is {known[rule].state}, not firing", where=str(run.path), fix=fix)
    old: dict[str, Any] = read_json_or_none(path) or {"silenced_until_s": 0, "acknowledged": ""}
    new = {"acknowledged": known[rule].key} if silenced_until_s is None else {"silenced_until_s": silenced_until_s}
    write_json(path, {**old, **new, "rule": rule, "user": user_name(), "time": utc_now(), "comment": comment})


def require_rule(run: RunDirectory, rule: str, known: Collection[str]) -> None:
    """Raise NotFoundError, which names the known rules, if a rule is not one of them."""
    if rule not in known:
        named = ", ".join(nearest(rule, known) or sorted(known)) or "a job with [alerts.rules]"
        raise NotFoundError(f"rule {rule!r} not found", where=str(run.path), fix=f"use {named}")


def runs_to_send(folders: Iterable[Path]) -> list[RunDirectory]:
    """Return the runs and tasks below folders of runs whose notifications wait in the outbox."""
    below = ("*/*/alerts/outbox/*", "*/*/tasks/*/alerts/outbox/*")
    found = {path.parents[2] for folder in folders for pattern in below for path in folder.glob(pattern)}
    return [RunDirectory(path) for path in sorted(found)]


def send_alerts(run: RunDirectory) -> tuple[int, int]:
    """Send the notifications of a run that wait in its outbox; return how many it sent, and how many still wait."""
    if not os.access(run.outbox, os.W_OK):  # there is none, or it belongs to another user
        return 0, 0
    notify = recorded_job(run).notify.model_dump(mode="json")
    if notify["sender"] == "node":
        return 0, 0
    return send_outbox(run, notify, say), len([*run.outbox.glob("[0-9]*.json*")])
