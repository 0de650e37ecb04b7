"""Evaluate the rules of [alerts] in the supervisor: notify channels, perform actions, and write `metrics/alerts.jsonl`."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.metrics.alert_rules import Readings, Rule, rules_of, window_of
from toolkit.metrics.alerts import Alert, AlertLog, AlertMachine, AlertState
from toolkit.metrics.records import RecordTail
from toolkit.metrics.training import TrainRecord
from toolkit.metrics.verdicts import Verdict
from toolkit.metrics.windows import Window, declared_metrics
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.bad_nodes import note_bad_node
from toolkit.rundir.files import read_json, utc_now, write_text
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.user_requests import add_requeue, note_request
from toolkit.slurm.commands import Slurm
from toolkit.supervise.channels import post
from toolkit.supervise.log import say
from toolkit.supervise.notifier import Notifier

__all__ = ["Alerting"]

ACTION_PERIOD_S = 3600.0  # an action of one kind is performed at most once in this time
_DRY = "dry run: "
NO_DATA_S = 300.0  # a rule without data for this time is reported; three times as long before the first step


class Alerting:
    """The rules of a job in one attempt. `left_s` returns the time to the walltime."""

    def __init__(
        self, attempt: AttemptDirectory, job: Mapping[str, Any], left_s: Callable[[], float], notifier: Notifier
    ) -> None:
        self._attempt, self._job, self._left_s, self._notifier = attempt, job, left_s, notifier
        self._rules = {rule.name: rule for rule in rules_of(job)}
        self._declared = declared_metrics(job)
        self._readings = Readings(self._rules.values(), self._declared)
        self._without_data, self._began_s = set(self._rules), time.monotonic()
        self._acted_s: dict[str, float] = {}  # by kind of action
        self._states: tuple[AlertMachine, AlertLog] | None = None

    def look(
        self,
        windows: Iterable[Window],
        training: Sequence[TrainRecord],
        verdicts: Iterable[Verdict],
        *,
        is_over: bool = False,
    ) -> None:
        """Evaluate all rules with what is new; once the attempt `is_over`, actions would concern the next one."""
        self._notifier.retry()
        if not self._rules:
            return
        machine, log = self._states = self._states or self._continued()
        now_s, requests = time.time(), self._requests()
        readings = self._readings.update([*windows, *window_of(training)], verdicts)
        self._say_without_data({name for name, one in readings.items() if one is None}, is_over)
        silenced = {one["rule"] for one in requests if one["silenced_until_s"] > now_s}
        for alert in machine.evaluate(readings, now_s, silenced, {one["acknowledged"] for one in requests}):
            rule = self._rules[alert.rule]
            if alert.is_notification and alert.state is AlertState.FIRING and rule.action:
                alert = replace(alert, action=self._act(rule, alert, now_s, is_over))
            log.write(alert)
            if alert.is_notification:
                self._notify(rule, alert)

    def _say_without_data(self, names: set[str], is_over: bool) -> None:
        """Report each rule that has had no data for too long, once."""
        self._without_data &= names
        recorded, seconds = self._readings.recorded, time.monotonic() - self._began_s
        for name in sorted(self._without_data):
            condition = self._rules[name].condition
            patience_s = NO_DATA_S * (1 if recorded else 3) + condition.window_s
            if seconds < patience_s and not (is_over and recorded and not condition.window_s):
                continue
            self._without_data.discard(name)
            who = "rank 0" if self._declared.get(condition.subject) is False else "any rank"
            found = f"recorded: {', '.join(sorted(recorded))}" if recorded else "the ranks have recorded no step"
            say(f"rule {name} has no data: there is no value of {condition.subject} from {who}; {found}")

    def resolve_all(self, reason: str) -> None:
        """Resolve every firing alert, because the run has ended: nothing else would close its incident."""
        if not self._rules:
            return
        machine, log = self._states = self._states or self._continued()
        for alert in list(machine.latest.values()):
            if alert.state is AlertState.FIRING:
                message = f"the run has ended: {reason}"
                alert = replace(alert, state=AlertState.RESOLVED, message=message, time=utc_now(), action="")
                machine.latest[alert.rule] = alert
                log.write(alert)
                if alert.is_notification:
                    self._notify(self._rules[alert.rule], alert)

    def _continued(self) -> tuple[AlertMachine, AlertLog]:
        """Return the states as the previous attempt left them."""
        path, earlier = self._attempt.run.metrics / "alerts.jsonl", list[Alert]()
        tail = RecordTail(path, Alert.from_line)
        while new := tail.new():
            earlier += new
        self._acted_s = {one.action.removeprefix(_DRY): datetime.fromisoformat(one.time).timestamp() for one in earlier}
        return AlertMachine(
            self._rules.values(), attempt=self._attempt.number, earlier=earlier, now_s=time.time()
        ), AlertLog(path)

    def _requests(self) -> list[dict[str, Any]]:
        """Return the silences and acknowledgements of this run, and of the array to which it belongs."""
        found, run = [], self._attempt.run
        for path in (one for folder in {run.control, run.whole.control} for one in folder.glob("alert-*.json")):
            try:
                found.append(read_json(path))
            except (ToolkitError, FileNotFoundError) as error:
                say(f"ignoring a silence or acknowledgement: {error}")
        return found

    def _notify(self, rule: Rule, alert: Alert) -> None:
        run = self._attempt.run
        # A rule may be called `critical`, and the line of a verdict begins with its severity.
        what = " ".join(dict.fromkeys((alert.severity, rule.name, alert.state)))
        message = alert.message.removeprefix(f"{alert.severity}: ")
        text = f"{run.job_name} {run.run_id}: {what}: {message} ({rule.when})"
        names = {"text": text, "event": "alert", "job_name": run.job_name, "run_id": run.run_id}
        document = {**names, "key": f"{run.run_id}-{alert.key}", **asdict(alert)}
        if "log" in rule.channels:
            post("log", document, self._job["notify"], {})
        self._notifier.add([one for one in rule.channels if one != "log"], document)

    def _act(self, rule: Rule, alert: Alert, now_s: float, is_over: bool) -> str:
        """Perform the action of a rule; return what was done, or why not."""
        run, action, job = self._attempt.run, rule.action, self._job
        begun = StartRecord.read(self._attempt)
        job_id = begun.job_id if begun is not None and "TOOLKIT_IN_ALLOCATION" not in os.environ else "local-"
        is_own = job_id.startswith("local-")  # the user's own machine or allocation
        for is_forbidden, why in (
            (is_over, "the attempt is over"),
            (now_s - self._acted_s.get(action, 0.0) < ACTION_PERIOD_S, f"{action} was done less than 1 h ago"),
            (self._left_s() < float(job["restart"]["warn_s"]), "the walltime is nearer than restart.warn_s"),
            (action == "requeue" and (is_own or not job["job"]["requeue"]), "the job cannot be requeued"),
            (action == "exclude_node" and (is_own or not alert.host), "the alert names no node of Slurm"),
        ):
            if is_forbidden:
                return f"not done: {why}"
        self._acted_s[action] = now_s
        if job["alerts"]["dry_run"]:
            return f"{_DRY}{action}"
        try:
            note_request(run, action, f"alert {rule.name}")
            if action == "exclude_node":
                note_bad_node(run, str(job["site"]["name"]), alert.host.partition(".")[0], alert.message)
            elif action == "requeue":
                add_requeue(run, utc_now())
                Slurm().requeue(job_id)
            else:
                write_text(run.control / action, utc_now() + "\n")
        except (ToolkitError, OSError) as error:
            return f"not done: {error}"
        return action
