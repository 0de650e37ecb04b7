"""The table [alerts]: conditions on metrics and verdicts, and what follows if they are met."""

from typing import Annotated, Literal

from pydantic import StringConstraints, field_validator

from toolkit.config.table import Table, key
from toolkit.metrics.alert_rules import FORM, parse_condition
from toolkit.units import parse_duration

__all__ = ["Name"]

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,40}$")]  # of a rule or channel; a part of file names
_DURATION = "a duration such as 30s, 10m, 2h or 1d"


class RuleTable(Table):
    """One rule of alerts."""

    when: str = key(
        ...,
        "The condition. It is met if one rank meets it; see `observe.metrics` for metrics of the program.",
        form=FORM,
    )
    for_: str = key("0s", "How long the condition must be met before the alert fires.", form=_DURATION, alias="for")
    severity: Literal["info", "warning", "critical"] = key("warning", "The severity that channels report.")
    cooldown: str = key("10m", "Time after an alert in which its rule does not fire again.", form=_DURATION)
    keep_firing: str = key("0s", "How long the condition must be over before the alert is resolved.", form=_DURATION)
    channels: list[str] = key(
        None,
        "Whom to notify: `log`, `mail`, `webhook`, or channels of `notify.channels`.",
        default_factory=lambda: ["log"],
    )
    action: Literal["", "save", "stop", "requeue", "exclude_node"] = key(
        "",
        "What the supervisor does when the alert fires, at most once per hour, and not within `restart.warn_s` of the walltime.",
    )

    @field_validator("when")
    @classmethod
    def _check_when(cls, when: str) -> str:
        parse_condition(when)
        return when

    @field_validator("for_", "cooldown", "keep_firing")
    @classmethod
    def _check_duration(cls, text: str) -> str:
        if parse_duration(text) is None:
            raise ValueError(f"expected {_DURATION}")
        return text


class AlertsTable(Table):
    """Alerts on a running job."""

    dry_run: bool = key(False, "Only record what the actions of rules would do.")
    rules: dict[Name, RuleTable] = key(None, "Rules by name.", form="tables [alerts.rules.NAME]", default_factory=dict)
