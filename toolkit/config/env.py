"""The table [env]: what the ranks' environment holds beside Slurm's, MPI's and the site's."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import field_validator

from toolkit.config.table import Table, key

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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

    @field_validator("vars", "passed")
    @classmethod
    def _check_names(cls, names: dict[str, str] | list[str]) -> dict[str, str] | list[str]:
        for name in names:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"names {name!r}, which is no variable name")
        return names
