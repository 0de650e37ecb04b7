"""The tables [env], [notify] and [restart]: the environment of the ranks, notifications, and restart policy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import field_validator, model_validator

from toolkit.config.alerts import Name
from toolkit.config.presets import preset
from toolkit.config.table import Table, key, refuse_value
from toolkit.errors import ToolkitError

__all__ = ["VARIABLE_PATTERN", "check_allocator"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_*]*")  # a name, or a pattern with `*` after the first character
# Variables that identify a rank, which only Slurm, MPI and the supervisor may set. Users may set variables that are srun
# options, such as SLURM_CPU_BIND.
_IDENTITY = re.compile(
    r"TOOLKIT_(?!SITES?$|RUNS$|DEVCLUSTER$).*|(PMI|PMIX|OMPI_COMM_WORLD)_.*"
    r"|SLURM_(JOB|STEP|ARRAY|TASK|NTASKS|NODE|NNODES|NPROCS|PROCID|LOCALID|SUBMIT|GTIDS|CONF).*"
)
_OF_APPLE = re.compile(r"PYTORCH_(ENABLE_)?MPS_.*")
# bash sets these itself and ignores inherited values.
_SET_BY_BASH = frozenset({"BASHOPTS", "EUID", "IFS", "OPTIND", "OPTERR", "PPID", "SHELLOPTS", "SHLVL", "UID", "_"})

Names = TypeVar("Names", bound=dict[str, str] | list[str])


def check_variable_names(names: Names) -> Names:
    """Return `names` if all are valid names of environment variables.

    Raises:
        PydanticCustomError: a name is not valid.
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
        except ValueError:  # raised for an unclosed quote
            return False
    return text == "env" or (kind == "file" and rest[:1] in ("/", "~"))


class EnvTable(Table):
    """Environment of the ranks. They do not inherit the login shell, only the variables named here."""

    free_text: ClassVar[frozenset[str]] = frozenset({"vars"})

    modules: list[str] = key(
        None, "Modules to load before the ranks start, after those of the site.", form='a list of modules such as ["cuda/12"]',
        default_factory=list,
    )  # fmt: skip
    setup: list[str] = key(
        None, "Shell lines to run before the ranks start, after those of the site.",
        form='a list of lines such as ["source env/bin/activate"]', default_factory=list,
    )  # fmt: skip
    vars: dict[str, str] = key(
        None, "Variables to set for every rank.", form='a table of strings such as { FLAG = "1" }', default_factory=dict
    )
    passed: list[str] = key(
        None,
        "Variables to pass from the submitting shell to the ranks, if they are set there; `*` matches any characters.",
        form='a list of variable names and patterns such as ["HF_HOME", "WANDB_*"]',
        default_factory=list,
        alias="pass",
    )
    secrets: dict[str, str] = key(
        None,
        "Variables whose values toolkit never records. `env` reads the variable of the submitting shell, `file:PATH` a file "
        "that only you can read, `command:COMMAND` the output of a command on the batch host.",
        form='a table such as { HF_TOKEN = "env", WANDB_API_KEY = "file:~/.wandb", DB = "command:pass show db" }',
        default_factory=dict,
    )
    stage: bool | str = key(
        False,
        "Copy the virtual environment of the ranks to `paths.local_scratch` of each node when the job starts: `true` copies the "
        "one that toolkit is installed in; a path copies that one.",
        form="true, false, or the path of a virtual environment",
    )

    malloc: Literal["default", "trimmed"] = key(
        "default",
        "How glibc allocates host memory of the ranks: `trimmed` uses one arena and returns freed blocks of 64 KiB or more at "
        "once, so that resident memory is what the rank uses; steps on the CPU may take longer. Variables that you set win.",
    )
    expandable_segments: bool = key(
        False,
        "Let torch's CUDA allocator extend its segments, which prevents fragmentation by tensors of many sizes. "
        "PYTORCH_ALLOC_CONF in `vars` or `pass` wins.",
    )

    @field_validator("stage")
    @classmethod
    def _check_stage(cls, stage: bool | str) -> bool | str:
        if isinstance(stage, str) and not stage.startswith(("/", "~")):
            raise ValueError("expected an absolute path")
        return stage

    @field_validator("vars", "secrets")
    @classmethod
    def _check_names(cls, names: dict[str, str]) -> dict[str, str]:
        return check_variable_names(names)

    @field_validator("passed")
    @classmethod
    def _check_passed(cls, names: list[str]) -> list[str]:
        for name in names:
            if not VARIABLE_PATTERN.fullmatch(name):
                raise refuse_value((), f"{name!r} is not a valid variable name or pattern such as HF_*")
            if name in _SET_BY_BASH:
                raise refuse_value((), f"bash sets {name} itself, so the value would be lost", f"set {name} in `vars`")
        return names

    @field_validator("vars", "secrets")
    @classmethod
    def _check_not_reserved(cls, names: dict[str, str]) -> dict[str, str]:
        for name in names:
            if _IDENTITY.fullmatch(name):
                raise refuse_value((name,), f"{name} is reserved: toolkit, Slurm or MPI sets it", f"remove {name}")
        return names

    @field_validator("secrets")
    @classmethod
    def _check_references(cls, secrets: dict[str, str]) -> dict[str, str]:
        for name, reference in secrets.items():
            if not _is_reference(reference):
                # The value may be the secret itself, so the error must not quote it.
                raise refuse_value(
                    (name,), "not a valid reference", 'write "env", "file:/PATH", "file:~/PATH" or "command:COMMAND"'
                )
        return secrets

    @model_validator(mode="after")
    def _check_once(self) -> EnvTable:
        for name in (*self.vars, *self.passed, *self.secrets):
            if _OF_APPLE.fullmatch(name):
                fix = f"remove {name}; train.memory, train.recompute and train.offload reduce the memory of a rank"
                raise refuse_value((), f"{name} configures GPUs of Apple, but ranks run on CUDA, ROCm or CPUs", fix)
        for name in self.secrets:
            if name in self.vars:
                raise refuse_value(("secrets", name), f"{name} is also in `vars`", f"remove {name} from `vars`")
        return self

    @property
    def secrets_of_shell(self) -> list[str]:
        """The names of the secrets that are read from the submitting shell."""
        return [name for name, reference in self.secrets.items() if reference == "env"]


def check_allocator(env: EnvTable, site_vars: Mapping[str, str]) -> None:
    """Reject settings of an allocator that the ranks do not load.

    Raises:
        ToolkitError: the settings belong to another allocator.
    """
    variables = {**site_vars, **env.vars}
    preloaded = variables.get("LD_PRELOAD", "")
    is_known = not any("LD_PRELOAD" in line for line in env.setup) and "LD_PRELOAD" not in env.passed
    other = next((name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in preloaded), "")
    if env.malloc != "default" and other:
        raise ToolkitError(
            f'malloc = "{env.malloc}" sets variables of glibc, but LD_PRELOAD replaces its allocator by {other}',
            where="env.malloc", fix='set malloc = "default", or remove LD_PRELOAD',
        )  # fmt: skip
    if "MALLOC_CONF" in variables and other != "jemalloc" and is_known:
        raise ToolkitError(
            "MALLOC_CONF configures jemalloc, which the ranks do not load", where="env.vars",
            fix="add LD_PRELOAD with the path of libjemalloc.so.2, or remove MALLOC_CONF",
        )  # fmt: skip


_ADDRESS = re.compile(r"[^\s,;<>\"'\\]+")
_PLACE = r"(?:env:[A-Za-z_][A-Za-z0-9_]*|file:[/~].*)"
_REFERENCE = re.compile(_PLACE)
_CHANNEL = re.compile(rf"mail:{_ADDRESS.pattern}(?:,{_ADDRESS.pattern})*|(?:slack|webhook|apprise|pagerduty):{_PLACE}")
_SERVER = re.compile(rf"smtps?://[\w.-]+(?::\d{{1,5}})?|{_PLACE}")

MailEvent = Literal[
    "BEGIN", "END", "FAIL", "REQUEUE", "TIME_LIMIT", "TIME_LIMIT_80", "TIME_LIMIT_90", "ARRAY_TASKS", "ALL"
]
WebhookEvent = Literal["end", "failure", "preemption", "stall"]


class NotifyTable(Table):
    """Notifications. Slurm sends mail; the supervisor calls the webhook, which never delays the run."""

    mail: list[str] = key(
        None,
        "Addresses to which Slurm sends mail.",
        form='a list of addresses such as ["me@example.org"]',
        default_factory=list,
    )
    mail_on: list[MailEvent] = key(
        None,
        "Events for which Slurm sends mail, as in sbatch --mail-type.",
        form='a list of BEGIN, END, FAIL, REQUEUE, TIME_LIMIT, ARRAY_TASKS such as ["END", "FAIL"]',
        default_factory=lambda: ["END", "FAIL", "REQUEUE"],
    )
    webhook: str = key(
        "",
        "Where to read the URL to which the supervisor posts JSON: `file:PATH` is a file that only you can read, `env:NAME` a "
        "variable of the submitting shell. The URL is a secret, since anyone who knows it can post.",
        form='a reference such as "file:~/.config/toolkit/webhook" or "env:TEAM_WEBHOOK"; the URL itself is a secret',
    )
    webhook_on: list[WebhookEvent] = key(
        None,
        "Events for which the supervisor calls the webhook.",
        form='a list of end, failure, preemption, stall such as ["end", "failure"]',
        default_factory=lambda: ["end", "failure", "preemption", "stall"],
    )

    channels: dict[Name, str] = key(
        None,
        "Channels for alerts by name. `mail:` is followed by addresses, `slack:`, `webhook:` and `apprise:` by the place of a "
        "URL as in `webhook`, `pagerduty:` by that of a routing key.",
        form='a table such as { me = "mail:me@example.org", team = "slack:file:~/.slack", oncall = "pagerduty:env:PD_KEY" }',
        default_factory=dict,
    )
    smtp: str = key(
        "smtp://localhost:25",
        "The server for mail of alerts. A URL with a password is a secret: write its place, as in `webhook`.",
        form='"smtp://HOST:PORT", "smtps://HOST:PORT" or a reference such as "file:~/.config/toolkit/smtp"',
    )
    mail_from: str = key("", "The sender of mail of alerts.", derived="the user at the host that sends the mail")
    sender: Literal["auto", "node", "login"] = key(
        "auto",
        "Who notifies the channels and `webhook`: `node` the supervisor on the first node, `login` the command `toolkit alerts "
        "send`, `auto` the supervisor, and the command for what the supervisor could not send.",
    )

    @field_validator("channels", "smtp")
    @classmethod
    def _check_channels(cls, value: dict[Name, str] | str) -> dict[Name, str] | str:
        for name, one in value.items() if isinstance(value, dict) else [("", value)]:
            if not (_CHANNEL if name else _SERVER).fullmatch(one):
                raise refuse_value((name,) if name else (), "not a valid value")  # not quoted, as it may be a secret
        return value

    @field_validator("mail")
    @classmethod
    def _check_addresses(cls, mail: list[str]) -> list[str]:
        for address in mail:
            if not _ADDRESS.fullmatch(address):
                raise refuse_value((), f"{address!r} is not a valid mail address")
        return mail

    @field_validator("webhook")
    @classmethod
    def _check_reference(cls, webhook: str) -> str:
        if webhook and not _REFERENCE.fullmatch(webhook):
            raise refuse_value((), "not a valid reference")  # the value is not quoted, as it may be the URL
        return webhook

    @property
    def references(self) -> dict[str, str]:
        """The references to secrets, by key."""
        named = {f"channels.{name}": value.partition(":")[2] for name, value in self.channels.items()}
        found = {"webhook": self.webhook, "smtp": self.smtp, **named}
        return {key: value for key, value in found.items() if _REFERENCE.fullmatch(value)}

    @property
    def variables(self) -> list[str]:
        """The variables of the submitting shell that contain secrets."""
        return [value.removeprefix("env:") for value in self.references.values() if value.startswith("env:")]


class RestartTable(Table):
    """When a run may start again. Each budget counts restarts for one cause only."""

    crashes: int = key(2, "Maximum number of restarts after a rank crashes; -1 is unlimited.", ge=-1)
    walltimes: int = key(-1, "Maximum number of requeues at the walltime; -1 is unlimited.", ge=-1)
    blind_requeues: int = key(
        1,
        "Number of consecutive walltimes without progress after which a script or executable ends; -1 is unlimited. Progress is "
        "a new step (`toolkit.step(N)`, `observe.step_line`, or a line `toolkit: step N` of rank 0), or a file that `progress` "
        "matches and whose name no earlier attempt had. Files that were only rewritten allow one more start; with `argv` they are progress.",
        form="a whole number, at least 1, or -1",
        ge=-1,
    )
    progress: str = key(
        "",
        "Pattern of files or folders that show progress by their names, relative to the working directory of the ranks. `~` is "
        "the home directory; variables such as $HOME are not expanded.",
        form='a pattern such as "out/step-*.pt"; `**` matches any folders',
    )
    argv: str | list[str] = key(
        None,
        "Arguments with which a script or executable continues, from the first attempt after one that made progress: an option "
        "replaces the same option of the entry, others are appended. Progress is a new or changed file that `progress` matches, or "
        "without that key a step. `{newest}` is the newest path that `progress` matches; an argument with it is omitted, together "
        "with its option, if there is none. Not in an array or a sweep. A preset also sets `progress`.",
        form='a list such as ["--init_from=resume"] or ["--resume", "{newest}"], or the name of a preset',
        default_factory=list,
    )
    out_of_memory: Literal["crash", "smaller_micro_batch"] = key(
        "crash",
        "How to continue after a rank runs out of memory: `crash` counts it as a crash; `smaller_micro_batch` restarts with half "
        "the `train.micro_batch` and the same global batch, at most 3 times, outside of the `crashes` budget.",
    )
    steps_must_succeed: bool = key(
        False,
        "Whether a batch script (`job.once`) that exits with 0 fails if one of its steps failed, with the exit code of the first one. "
        "By default toolkit only reports these steps, and the run and jobs after it follow the script, as with sbatch.",
    )
    preemptions: int = key(-1, "Maximum number of requeues after preemption; -1 is unlimited.", ge=-1)
    warn_s: int = key(
        120, "Seconds before the walltime at which Slurm tells the ranks to save, less than the walltime.",
        derived="120, or a quarter of a walltime below 8 minutes",
        ge=1, le=65535,
    )  # fmt: skip
    stall_s: int = key(900, "Seconds without a completed step after which an attempt counts as stalled.", ge=1)
    collective_timeout_s: int = key(
        1800,
        "Seconds that a rank waits in a collective for the other ranks before it fails, if the entry is a function. A smaller "
        "`stall_s` takes effect first.",
        ge=1,
    )

    @field_validator("blind_requeues")
    @classmethod
    def _check_blind_requeues(cls, number: int) -> int:
        if not number:
            raise refuse_value(
                (), "expected a number of walltimes from 1, or -1, got 0", "set walltimes = 0 for no requeue"
            )
        return number

    @field_validator("argv")
    @classmethod
    def _expand_argv(cls, argv: str | list[str]) -> list[str]:
        return preset(argv, "argv") if isinstance(argv, str) else argv

    @field_validator("progress")
    @classmethod
    def _check_progress(cls, pattern: str) -> str:
        try:
            Path(pattern).expanduser()
        except RuntimeError:
            user = pattern.partition("/")[0]
            raise refuse_value((), f"{user} is not the home folder of a user", "write the absolute path") from None
        return pattern

    health: Literal["requeue", "warn", "off"] = key(
        "requeue",
        "Health check of the nodes each time the job starts. A node that fails is excluded for a day. `requeue` also starts "
        "the job again without that node, which counts against the `crashes` budget.",
    )
