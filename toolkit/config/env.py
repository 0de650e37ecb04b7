"""The table [env]: the ranks' environment in addition to Slurm's, MPI's and the site's."""

from __future__ import annotations

import re
import shlex
from typing import ClassVar, TypeVar

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
