"""The table [env]: what the ranks' environment holds beside Slurm's, MPI's and the site's."""

from __future__ import annotations

import re
from typing import ClassVar, TypeVar

from pydantic import field_validator

from toolkit.config.table import Table, key, refuse_value

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Who a rank is and where: Slurm, MPI and the supervisor say it, and nobody else may. Options of srun such as
# SLURM_CPU_BIND are the user's.
_IDENTITY = re.compile(
    r"TOOLKIT_(?!SITES?$|RUNS$|DEVCLUSTER$).*|(PMI|PMIX|OMPI_COMM_WORLD)_.*"
    r"|SLURM_(JOB|STEP|ARRAY|TASK|NTASKS|NODE|NNODES|NPROCS|PROCID|LOCALID|SUBMIT|GTIDS|CONF).*"
)
# bash sets these itself, whatever it inherits.
_OF_BASH = frozenset({"BASHOPTS", "EUID", "IFS", "OPTIND", "OPTERR", "PPID", "SHELLOPTS", "SHLVL", "UID", "_"})

Names = TypeVar("Names", bound=dict[str, str] | list[str])


def check_variable_names(names: Names) -> Names:
    """Return `names` where each is one that shells take for a variable's.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"names {name!r}, which is no variable name")
    return names


class EnvTable(Table):
    """Ranks do not inherit the login shell; they get what is named here."""

    free_text: ClassVar[frozenset[str]] = frozenset({"vars"})

    vars: dict[str, str] = key(
        None,
        "Variables that are set for every rank.",
        form='a table of texts such as { FLAG = "1" }',
        default_factory=dict,
    )
    passed: list[str] = key(
        None,
        "Variables of the submitting shell that are passed on, where they are set.",
        form='a list of variable names such as ["HF_HOME"]',
        default_factory=list,
        alias="pass",
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
            raise ValueError("is no absolute path")
        return stage

    @field_validator("vars", "passed")
    @classmethod
    def _check_names(cls, names: dict[str, str] | list[str]) -> dict[str, str] | list[str]:
        return check_variable_names(names)

    @field_validator("passed")
    @classmethod
    def _check_passed(cls, names: list[str]) -> list[str]:
        for name in names:
            if name in _OF_BASH:
                raise refuse_value((), f"{name} is bash's own, and would not arrive", "set it in `vars`")
        return names

    @field_validator("vars")
    @classmethod
    def _check_whose(cls, names: dict[str, str]) -> dict[str, str]:
        for name in names:
            if _IDENTITY.fullmatch(name):
                raise refuse_value((name,), f"{name} is set for each rank by the toolkit, Slurm or MPI", "take it out")
        return names
