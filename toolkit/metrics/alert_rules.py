"""Rules of alerts: conditions on metrics or verdicts, compared with what a run records. Standard library only."""

import math
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from statistics import median
from typing import Any, NamedTuple

from toolkit.metrics.training import TrainRecord
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, line_of_verdict, names_of_ranks
from toolkit.metrics.windows import COLUMNS, Statistics, Window, statistics_of
from toolkit.units import parse_duration

__all__ = [
    "FORM",
    "SERIES",
    "Condition",
    "Reading",
    "Readings",
    "Rule",
    "channels_of",
    "parse_condition",
    "rules_of",
    "window_of",
]

FORM = 'a condition such as "step_s.p95 > 2", "rate(loss, 60s) >= 0.1", "verdict:stall" or "verdict:* >= critical"'
_STATISTICS = {"min": "minimum", "max": "maximum"}
_OF_TRAINING = -1  # the rank of windows of `train.jsonl`
_TRAINING = ("loss", "grad_norm", "tokens_per_s", "mfu", "lr")
SERIES = tuple(dict.fromkeys((*COLUMNS, *_TRAINING)))  # what a run may record without a declaration
_ALIKE = 0.05  # a rank whose value is this near to the median of the others is not the cause
_OPERATORS = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_METRIC = re.compile(
    r"(?:rate\(\s*(?P<of>[^\s,()<>=!:]+)\s*,\s*(?P<window>\w+)\s*\)|(?P<name>[^\s,()<>=!:]+?)(?:\.(?P<statistic>mean|min|max|p95))?)"
    r"\s*(?P<operator>[<>]=?|[=!]=)\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
)
_VERDICT = re.compile(rf"verdict:(?P<kind>\*|{'|'.join(VerdictKind)})(?:\s*>=\s*(?P<severity>{'|'.join(Severity)}))?")


class Condition(NamedTuple):
    """`subject` is a metric, or the kind of a verdict with a least `severity`; `window_s` is that of a rate, else 0."""

    subject: str
    statistic: str = "mean"
    operator: str = ">"
    limit: float = 0.0
    window_s: float = 0.0
    severity: Severity | None = None


@dataclass(frozen=True)
class Rule:
    """One table of `[alerts.rules]`; durations are in seconds."""

    name: str
    when: str
    for_s: float = 0.0
    cooldown_s: float = 0.0
    keep_firing_s: float = 0.0
    severity: Severity = Severity.WARNING
    channels: tuple[str, ...] = ("log",)
    action: str = ""

    @property
    def condition(self) -> Condition:
        return parse_condition(self.when)


class Reading(NamedTuple):
    """Whether a condition is met, and the worst value, or the most severe verdict. `place` names `ranks` and `host`."""

    is_met: bool
    value: float
    message: str
    subject: str = ""
    ranks: tuple[int, ...] = ()
    host: str = ""
    place: str = ""


def parse_condition(text: str) -> Condition:
    """Parse the `when` of a rule; ValueError states what is wrong."""
    if verdict := _VERDICT.fullmatch(text.strip()):
        return Condition(verdict["kind"], severity=Severity(verdict["severity"] or "info"))
    match = _METRIC.fullmatch(text.strip())
    window_s = parse_duration(match["window"]) if match and match["of"] else 0.0
    if match is None or window_s is None or (match["of"] and not window_s):
        raise ValueError(f"{text!r} is not a valid condition{_hint(text.strip())}")
    subject, statistic = match["of"] or match["name"], match["statistic"] or "mean"
    metric, _, other = subject.rpartition(".")
    if metric in COLUMNS:  # a program may record a metric `queue.count`
        raise ValueError(f"{text!r} is not a valid condition: expected .mean, .min, .max or .p95, got .{other}")
    return Condition(subject, statistic, match["operator"], float(match["limit"]), window_s)


def _hint(text: str) -> str:
    """Return what a condition should be if it resembles a valid one; else ""."""
    if match := re.fullmatch(r"verdict:([^\s>]+)(?:\s*>=\s*(\S+))?", text):
        for part, names in ((match[1], [*VerdictKind, "*"]), (match[2] or "info", [*Severity])):
            if part not in names:
                return f": expected {(get_close_matches(part, names, n=1) or [', '.join(names)])[0]}, got {part!r}"
    if match := re.match(r"([^\s:]+):mean\b", text):
        return f": write {match[1]}; only observe.metrics has `:mean`"
    return ""


def rules_of(job: Mapping[str, Any]) -> list[Rule]:
    """Return the rules of a resolved job, whose values are valid."""
    return [
        Rule(
            name, one["when"], channels=tuple(one["channels"]), severity=Severity(one["severity"]), action=one["action"],
            **{f"{key}_s": parse_duration(one[key]) or 0.0 for key in ("for", "cooldown", "keep_firing")},
        )
        for name, one in job.get("alerts", {}).get("rules", {}).items()
    ]  # fmt: skip


def channels_of(notify: Mapping[str, Any]) -> dict[str, str]:
    """Return the channels that rules of a job may name, each as KIND:TARGET."""
    own = {"webhook": notify.get("webhook"), "mail": ",".join(notify.get("mail") or ())}
    return {**notify.get("channels", {}), "log": "log:", **{name: f"{name}:{one}" for name, one in own.items() if one}}


def window_of(records: Sequence[TrainRecord]) -> list[Window]:
    """Return records of `train.jsonl` as a window of no rank; [] without records."""
    if not records:
        return []
    values = {name: [value for one in records if (value := getattr(one, name)) is not None] for name in _TRAINING}
    metrics = {name: statistics_of(found) for name, found in values.items() if found}
    ended_s = datetime.fromisoformat(records[-1].time).timestamp()
    return [Window(_OF_TRAINING, "", ended_s, 0.0, records[0].step, records[-1].step, len(records), metrics)]


class Readings:
    """What the conditions of rules read: the newest values by metric and rank, and the raised verdicts.

    `recorded` are all metrics so far; of a metric in `declared`, rules compare the mean over ranks or the value of rank 0.
    """

    def __init__(self, rules: Collection[Rule], declared: Mapping[str, bool] | None = None) -> None:
        self._conditions, self._declared = {rule.name: rule.condition for rule in rules}, declared or {}
        self.recorded: set[str] = set()
        self._spans_s = {one.subject: 0.0 for one in self._conditions.values()}  # the longest window of a rate
        for one in self._conditions.values():
            self._spans_s[one.subject] = max(one.window_s, self._spans_s[one.subject])
        self._newest: dict[tuple[str, int], tuple[Statistics, str]] = {}
        self._means: dict[tuple[str, int], list[tuple[float, float]]] = {}  # by time, as long as rates need them
        self._raised: dict[object, Verdict] = {}

    def update(self, windows: Iterable[Window], verdicts: Iterable[Verdict]) -> dict[str, Reading | None]:
        """Return the reading of each rule after new windows, in any order, and changes of verdicts."""
        self._raised |= {verdict.key: verdict for verdict in verdicts}
        for window in sorted(windows, key=lambda one: one.began_s):
            self.recorded.update(window.metrics)
            for name in self._spans_s.keys() & window.metrics.keys():
                self._newest[name, window.rank] = (window.metrics[name], window.host)
                means, ended_s = self._means.setdefault((name, window.rank), []), window.began_s + window.seconds
                means.append((ended_s, window.metrics[name].mean))
                while len(means) > 1 and means[1][0] <= ended_s - self._spans_s[name]:
                    means.pop(0)
        return {name: self._read(condition) for name, condition in self._conditions.items()}

    def _read(self, one: Condition) -> Reading | None:
        """Compare the worst rank; None if no rank has the metric, or not yet for the whole window of a rate."""
        if one.severity is not None:
            return self._read_verdicts(one.subject, one.severity.order)
        found = []
        for (name, rank), (statistics, host) in self._newest.items():
            if name == one.subject:
                value = getattr(statistics, _STATISTICS.get(one.statistic, one.statistic))
                value = _rate(self._means[name, rank], one.window_s) if one.window_s else value
                found += [] if math.isnan(value) else [(value, rank, host)]
        is_mean = self._declared.get(one.subject)
        if is_mean is not None:  # one value, and no rank is worse than another
            of_training = [each for each in found if each[1] == _OF_TRAINING]
            found = of_training or [each for each in found if is_mean or not each[1]]
            found = [(sum(each[0] for each in found) / len(found), _OF_TRAINING, "")] if found else []
        if not found:
            return None
        met = [each for each in found if _OPERATORS[one.operator](each[0], one.limit)]
        worst = (min if one.operator[0] == "<" else max)(met or found)
        value, rank, host = worst
        name = f"the rate of {one.subject}" if one.window_s else f"{one.subject}.{one.statistic}"
        others = [each[0] for each in found if each is not worst]
        if rank == _OF_TRAINING or (others and math.isclose(value, median(others), rel_tol=_ALIKE)):
            return Reading(bool(met), value, f"{name} is {value:.6g}", one.subject)
        place = f" on {names_of_ranks((rank,), host)}"
        return Reading(bool(met), value, f"{name} is {value:.6g}", one.subject, (rank,), host, place)

    def _read_verdicts(self, kind: str, least: int) -> Reading:
        raised = [one for one in self._raised.values() if one.state == "raised" and one.severity.order >= least]
        alike = [one for one in raised if kind in ("*", one.kind)]
        if not alike:
            return Reading(False, 0.0, "no such verdict is raised", kind)
        worst = max(alike, key=lambda one: (one.severity.order, one.cost_s_per_hour))
        return Reading(True, len(alike), line_of_verdict(worst), worst.kind, worst.ranks, worst.host)


def _rate(means: Sequence[tuple[float, float]], window_s: float) -> float:
    """Return the change per second over the window; NaN if the values do not span it."""
    ended_s, last = means[-1]
    began_s, first = max((one for one in means if one[0] <= ended_s - window_s), default=(ended_s, last))
    return (last - first) / (ended_s - began_s) if ended_s > began_s else math.nan
