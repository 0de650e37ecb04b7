"""The table [notify]: who is notified of a run's events."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from toolkit.config.table import Table, key, refuse_value

_ADDRESS = re.compile(r"[^\s,;<>\"'\\]+")
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:[/~].*")

MailEvent = Literal[
    "BEGIN", "END", "FAIL", "REQUEUE", "TIME_LIMIT", "TIME_LIMIT_80", "TIME_LIMIT_90", "ARRAY_TASKS", "ALL"
]
WebhookEvent = Literal["end", "failure", "preemption", "stall"]


class NotifyTable(Table):
    """Slurm sends mail; the supervisor calls a webhook, which never delays the run."""

    mail: list[str] = key(
        None,
        "Addresses that Slurm sends mail to.",
        form='a list of addresses such as ["me@example.org"]',
        default_factory=list,
    )
    mail_on: list[MailEvent] = key(
        None,
        "The events, as in sbatch's --mail-type.",
        form='a list of BEGIN, END, FAIL, REQUEUE, TIME_LIMIT, ARRAY_TASKS such as ["END", "FAIL"]',
        default_factory=lambda: ["END", "FAIL", "REQUEUE"],
    )
    webhook: str = key(
        "",
        "Reference to the URL that JSON is posted to; with the URL, anyone can post. `file:PATH` is a file that only you may "
        "read, `env:NAME` a variable of the submitting shell.",
        form='a reference such as "file:~/.config/toolkit/webhook" or "env:TEAM_WEBHOOK"; the URL itself is a secret',
    )
    webhook_on: list[WebhookEvent] = key(
        None,
        "The events of the webhook.",
        form='a list of end, failure, preemption, stall such as ["end", "failure"]',
        default_factory=lambda: ["end", "failure", "preemption", "stall"],
    )

    @field_validator("mail")
    @classmethod
    def _check_addresses(cls, mail: list[str]) -> list[str]:
        for address in mail:
            if not _ADDRESS.fullmatch(address):
                raise refuse_value((), f"{address!r} is not a valid address")
        return mail

    @field_validator("webhook")
    @classmethod
    def _check_reference(cls, webhook: str) -> str:
        if webhook and not _REFERENCE.fullmatch(webhook):
            raise refuse_value((), "not a valid reference")  # not quoted: it may be the URL itself
        return webhook

    @property
    def webhook_variable(self) -> str:
        """The variable of the submitting shell that contains the URL; "" if there is none."""
        kind, _, name = self.webhook.partition(":")
        return name if kind == "env" else ""
