"""`metrics/alerts.jsonl`, and the states of alerts in the terms of Prometheus Alertmanager. Standard library only.

The supervisor is the only writer. A rule has one alert at a time; a line is added when its state changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum

from toolkit.metrics.alert_rules import Reading, Rule
from toolkit.metrics.records import RecordLog
from toolkit.metrics.verdicts import Severity, VerdictKind
from toolkit.rundir.files import utc_of

__all__ = ["Alert", "AlertLog", "AlertMachine", "AlertState"]

# Verdicts need time to be raised again after a restart: an alert of an earlier attempt is resolved after this time at the earliest.
SETTLE_S = 300.0


class AlertState(StrEnum):
    """NO_DATA: the metric was never recorded. PENDING: the condition is met, but the alert waits for `for` or the cooldown."""

    NO_DATA = "no_data"
    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True)
class Alert:
    """The state of a rule. The fields are the keys of a line.

    value: what was compared, null if not finite.
    subject: the metric, or the kind of the most severe verdict.
    began_s: when the condition was first met, in seconds since the epoch.
    hidden_by: why no channel was notified of a firing alert: `silence`, `acknowledgement` or the rule of another alert.
    is_notified: a firing or resolved line with `true` is one notification.
    action: what the action of the rule did.
    """

    rule: str
    state: AlertState = AlertState.NO_DATA
    severity: Severity = Severity.WARNING
    message: str = ""
    value: float | None = None
    subject: str = ""
    ranks: tuple[int, ...] = ()
    host: str = ""
    began_s: float = 0.0
    hidden_by: str = ""
    is_notified: bool = False
    action: str = ""
    attempt: int = 0
    time: str = ""

    @property
    def key(self) -> str:
        """What identifies the alert within the run until it is resolved, also after a restart."""
        return f"{self.rule}-{self.began_s:.3f}"

    @property
    def is_notification(self) -> bool:
        return self.is_notified and self.state in (AlertState.FIRING, AlertState.RESOLVED)

    def to_line(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Alert:
        row = json.loads(line)
        row["state"], row["severity"] = AlertState(row["state"]), Severity(row["severity"])
        row["ranks"], row["began_s"] = tuple(row["ranks"]), float(row["began_s"])
        datetime.fromisoformat(row["time"])
        return cls(**row)


class AlertLog(RecordLog[Alert]):
    """Appends to `alerts.jsonl`."""


# A firing alert with one of the first subjects or severities hides others with one of the second, if required of the same rank.
_SLOW = {VerdictKind.THROUGHPUT, VerdictKind.STARVATION, VerdictKind.GPU_IDLE, "tokens_per_s", "mfu", "data_s"}
INHIBITIONS: tuple[tuple[set[str], set[str], bool], ...] = (
    ({VerdictKind.STALL}, {*_SLOW}, False),
    ({Severity.CRITICAL}, {Severity.WARNING, Severity.INFO}, True),
)


def _is_hidden(alert: Alert, source: Alert) -> bool:
    names, others = {alert.subject, alert.severity}, {source.subject, source.severity}
    is_of_all = not alert.ranks and not source.ranks and alert.subject == source.subject
    is_same_rank = is_of_all or not {*alert.ranks}.isdisjoint(source.ranks)
    return any(
        others & by and names & hidden and not names & by and (is_same_rank or not of_same_rank)
        for by, hidden, of_same_rank in INHIBITIONS
    )


class AlertMachine:
    """The states of all rules. `earlier` are the lines that the run has already written, `now_s` is the time of the start."""

    def __init__(
        self, rules: Collection[Rule], *, attempt: int = 0, earlier: Iterable[Alert] = (), now_s: float = 0.0
    ) -> None:
        self._rules, self._attempt = rules, attempt
        self.latest = {rule.name: Alert(rule.name, severity=rule.severity) for rule in rules}
        self._met_s: dict[str, float] = {}  # when the condition was last met, by rule
        self._resolved_s: dict[str, float] = {}
        self._notified: dict[str, set[str]] = {}  # the subjects since the alert fired, by rule
        for alert in earlier:
            if alert.rule in self.latest:
                self.latest[alert.rule], self._met_s[alert.rule] = alert, now_s + SETTLE_S
                self._notified[alert.rule] = {alert.subject} if alert.is_notified else set()
                if alert.state is AlertState.RESOLVED:
                    self._resolved_s[alert.rule] = datetime.fromisoformat(alert.time).timestamp()

    def evaluate(
        self, readings: Mapping[str, Reading | None], now_s: float, silenced: Collection[str] = (),
        acknowledged: Collection[str] = (),
    ) -> list[Alert]:  # fmt: skip
        """Return the alerts that changed. `readings` are by rule, `silenced` rules, `acknowledged` keys of alerts."""
        time = utc_of(now_s)
        found = [self._next(rule, readings.get(rule.name), now_s) for rule in self._rules]
        firing, changes = [alert for alert in found if alert.state is AlertState.FIRING], []
        for alert in found:
            old, notified = self.latest[alert.rule], self._notified.setdefault(alert.rule, set())
            # A verdict of another kind is news for a rule on all kinds.
            is_news = alert.state is AlertState.FIRING and alert.subject not in notified
            if is_news:
                why = "silence" if alert.rule in silenced else "acknowledgement" if alert.key in acknowledged else ""
                why = why or next((one.rule for one in firing if _is_hidden(alert, one)), "")
                is_news = not why
                if is_news or not alert.is_notified:  # what was notified must be resolved
                    alert = replace(alert, hidden_by=why, is_notified=is_news)
            if is_news:
                notified.add(alert.subject)
            elif alert.state is not AlertState.FIRING:
                notified.clear()
            states = [(one.state, one.is_notified, one.hidden_by) for one in (alert, old)]
            if is_news or states[0] != states[1]:
                alert = replace(alert, time=time, attempt=self._attempt)
                changes.append(alert)
            self.latest[alert.rule] = alert
        return changes

    def _next(self, rule: Rule, reading: Reading | None, now_s: float) -> Alert:
        """Return the alert of a rule after a reading, before it is known whether it is hidden."""
        before = self.latest[rule.name]
        is_past_pending = before.state in (AlertState.FIRING, AlertState.RESOLVED)
        if reading is None:  # an alert does not change until its metric has a value again
            return before if is_past_pending else Alert(rule.name, severity=rule.severity)
        value = reading.value if math.isfinite(reading.value) else None
        alert = replace(
            before, severity=rule.severity, message=reading.message + reading.place, subject=reading.subject,
            ranks=reading.ranks, host=reading.host, value=value, action="",
        )  # fmt: skip
        if reading.is_met:
            self._met_s[rule.name] = now_s
            if before.state is AlertState.FIRING:
                # What channels were notified of names the ranks, until another subject does.
                return before if before.is_notified and before.subject == alert.subject else alert
            began_s = before.began_s if before.state is AlertState.PENDING else now_s
            is_cool = now_s - self._resolved_s.get(rule.name, -math.inf) >= rule.cooldown_s
            state = AlertState.FIRING if is_cool and now_s - began_s >= rule.for_s else AlertState.PENDING
            return replace(alert, state=state, began_s=began_s, is_notified=False, hidden_by="")
        if before.state is AlertState.FIRING and now_s - self._met_s[rule.name] >= rule.keep_firing_s:
            self._resolved_s[rule.name] = now_s
            # The rank that is the worst one by now had no part in the alert.
            return replace(
                alert, state=AlertState.RESOLVED, message=reading.message, ranks=before.ranks, host=before.host
            )
        if is_past_pending:
            return before
        return replace(alert, state=AlertState.INACTIVE, began_s=0.0, is_notified=False, hidden_by="")
