"""The table [notify]: who is notified about a run."""

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
    """Mail is Slurm's; a webhook is called by the supervisor, and never holds the run up."""

    mail: list[str] = key(
        None,
        "Addresses that Slurm sends mail to.",
        form='a list of addresses such as ["me@example.org"]',
        default_factory=list,
    )
    mail_on: list[MailEvent] = key(
        None,
        "When, in the words of sbatch's --mail-type.",
        form='a list of BEGIN, END, FAIL, REQUEUE, TIME_LIMIT, ARRAY_TASKS such as ["END", "FAIL"]',
        default_factory=lambda: ["END", "FAIL", "REQUEUE"],
    )
    webhook: str = key(
        "",
        "Where toolkit finds the URL to post JSON to, which is a secret: `file:PATH` that only you can read, or "
        "`env:NAME`, a variable of the submitting shell.",
        form='a reference such as "file:~/.config/toolkit/webhook" or "env:TEAM_WEBHOOK"; the URL itself is a secret',
    )
    webhook_on: list[WebhookEvent] = key(
        None,
        "When it is called.",
        form='a list of end, failure, preemption, stall such as ["end", "failure"]',
        default_factory=lambda: ["end", "failure", "preemption", "stall"],
    )

    @field_validator("mail")
    @classmethod
    def _check_addresses(cls, mail: list[str]) -> list[str]:
        for address in mail:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"{address!r} is not a valid address")
        return mail

    @field_validator("webhook")
    @classmethod
    def _check_reference(cls, webhook: str) -> str:
        if webhook and not _REFERENCE.fullmatch(webhook):
            raise refuse_value((), "the value is not a valid reference")  # nor quoted: it may be the URL
        return webhook

    @property
    def webhook_variable(self) -> str:
        """The variable of the submitting shell that holds the URL; "" where none does."""
        kind, _, name = self.webhook.partition(":")
        return name if kind == "env" else ""
