"""The table [env]: the ranks' environment in addition to Slurm's, MPI's and the site's."""

from __future__ import annotations

import re
import shlex
from typing import ClassVar, Literal, TypeVar

from pydantic import field_validator, model_validator

from toolkit.config.table import Table, key, refuse_value

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The identity of a rank: only Slurm, MPI and the supervisor may set it. Options of srun such as SLURM_CPU_BIND are
# the user's.
_IDENTITY = re.compile(
    r"TOOLKIT_(?!SITES?$|RUNS$|DEVCLUSTER$).*|(PMI|PMIX|OMPI_COMM_WORLD)_.*"
    r"|SLURM_(JOB|STEP|ARRAY|TASK|NTASKS|NODE|NNODES|NPROCS|PROCID|LOCALID|SUBMIT|GTIDS|CONF).*"
)
# bash sets these itself, independently of what it inherits.
_OF_BASH = frozenset({"BASHOPTS", "EUID", "IFS", "OPTIND", "OPTERR", "PPID", "SHELLOPTS", "SHLVL", "UID", "_"})

Names = TypeVar("Names", bound=dict[str, str] | list[str])


def check_variable_names(names: Names) -> Names:
    """Return `names` if each is a valid name of a shell variable.

    Raises:
        PydanticCustomError: one is not.
    """
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise refuse_value((), f"{name!r} is not a valid variable name")
    return names


def _is_reference(text: str) -> bool:
    kind, _, rest = text.partition(":")
    if kind == "command":
        try:
            return bool(shlex.split(rest))
        except ValueError:  # an unclosed quote
            return False
    return text == "env" or (kind == "file" and rest[:1] in ("/", "~"))


class EnvTable(Table):
    """Ranks do not inherit the login shell; they get only the variables named here."""

    free_text: ClassVar[frozenset[str]] = frozenset({"vars"})

    vars: dict[str, str] = key(
        None,
        "Variables that are set for every rank.",
        form='a table of strings such as { FLAG = "1" }',
        default_factory=dict,
    )
    passed: list[str] = key(
        None,
        "Variables of the submitting shell that ranks get, if they are set.",
        form='a list of variable names such as ["HF_HOME"]',
        default_factory=list,
        alias="pass",
    )
    secrets: dict[str, str] = key(
        None,
        "Variables whose values are recorded nowhere: `env` reads the variable of the submitting shell, `file:PATH` a file "
        "that only you may read, `command:COMMAND` the output of a command on the batch host.",
        form='a table such as { HF_TOKEN = "env", WANDB_API_KEY = "file:~/.wandb", DB = "command:pass show db" }',
        default_factory=dict,
    )
    stage: bool | str = key(
        False,
        "Copy the virtual environment that ranks run in to each node's `paths.local_scratch` at a start: `true` for the "
        "one that toolkit is installed in, or another's folder.",
        form="true, false, or the path of a virtual environment",
    )

    @field_validator("stage")
    @classmethod
    def _check_stage(cls, stage: bool | str) -> bool | str:
        if isinstance(stage, str) and not stage.startswith(("/", "~")):
            raise ValueError("is not an absolute path")
        return stage

    @field_validator("vars", "passed", "secrets")
    @classmethod
    def _check_names(cls, names: dict[str, str] | list[str]) -> dict[str, str] | list[str]:
        return check_variable_names(names)

    @field_validator("passed")
    @classmethod
    def _check_passed(cls, names: list[str]) -> list[str]:
        for name in names:
            if name in _OF_BASH:
                raise refuse_value((), f"bash sets {name} itself, so the value would be lost", "set it in `vars`")
        return names

    @field_validator("vars", "secrets")
    @classmethod
    def _check_whose(cls, names: dict[str, str]) -> dict[str, str]:
        for name in names:
            if _IDENTITY.fullmatch(name):
                raise refuse_value((name,), f"toolkit, Slurm or MPI sets {name} for each rank", "remove it")
        return names

    @field_validator("secrets")
    @classmethod
    def _check_references(cls, secrets: dict[str, str]) -> dict[str, str]:
        for name, reference in secrets.items():
            if not _is_reference(reference):
                # The value may be the secret itself, so no message repeats it.
                raise refuse_value(
                    (name,), "not a valid reference", 'write "env", "file:/PATH", "file:~/PATH" or "command:COMMAND"'
                )
        return secrets

    @model_validator(mode="after")
    def _check_once(self) -> EnvTable:
        for name in self.secrets:
            if name in self.vars:
                raise refuse_value(("secrets", name), f"{name} is also in `vars`", "remove it from `vars`")
        return self

    @property
    def secrets_of_shell(self) -> list[str]:
        """The secrets whose values are in the submitting shell."""
        return [name for name, reference in self.secrets.items() if reference == "env"]


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


class RestartTable(Table):
    """Each budget counts its own cause."""

    crashes: int = key(2, "Restarts after a crash of a rank; -1 is unlimited.", ge=-1)
    walltimes: int = key(-1, "Requeues at walltime; -1 is unlimited.", ge=-1)
    preemptions: int = key(-1, "Requeues after preemption; -1 is unlimited.", ge=-1)
    warn_s: int = key(120, "Seconds before walltime at which the ranks are signalled to save.", ge=1, le=65535)
    stall_s: int = key(900, "Seconds without a step after which the attempt counts as stalled.", ge=1)
    collective_timeout_s: int = key(
        1800,
        "Seconds that a rank of a function waits in a collective for the others before it fails. A smaller `stall_s` takes "
        "effect first.",
        ge=1,
    )
    health: Literal["requeue", "warn", "off"] = key(
        "requeue",
        "A check of the nodes before a start's first attempt. A node that fails it is excluded for a day; `requeue` also "
        "ends this start and begins another one without the node, from the budget of `crashes`.",
    )
