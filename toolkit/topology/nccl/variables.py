"""The table of NCCL's environment variables, and NCCL's release numbers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

from toolkit.errors import ToolkitError

Version = tuple[int, ...]
Kind = Literal["system", "tuning", "debug", "undocumented", "torch"]
State = Literal["", "removed", "renamed", "deprecated"]

PAGE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
TORCH_PAGE = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
# Sections of the page whose anchor is not the variable's name.
_SECTIONS = {
    "NCCL_NET_GDR_LEVEL": "nccl-net-gdr-level-formerly-nccl-ib-gdr-level",
    "NCCL_IB_GDR_LEVEL": "nccl-net-gdr-level-formerly-nccl-ib-gdr-level",
    "NCCL_MAX_NRINGS": "nccl-max-nchannels",
    "NCCL_MIN_NRINGS": "nccl-min-nchannels",
}
_VERSION = re.compile(r"v?([0-9]{1,3})\.([0-9]{1,3})(?:\.([0-9]{1,3}))?(?:[-+.U][\w.+-]*)?", re.ASCII)
_CODE = re.compile(r"([0-9])([0-9]{2})([0-9]{2})|([0-9])([0-9])([0-9]{2})", re.ASCII)


@dataclass(frozen=True)
class Variable:
    """One row of nccl_variables.toml, whose head comment defines the fields. A missing version is empty."""

    name: str
    since: Version
    kind: Kind
    form: str
    default: str
    does: str
    state: State = ""
    changed: Version = ()
    now: str = ""

    @property
    def source(self) -> str:
        """The address of the variable's documentation."""
        if self.kind == "torch":
            return TORCH_PAGE
        if self.kind == "undocumented":
            return PAGE
        return f"{PAGE}#{_SECTIONS.get(self.name) or self.name.lower().replace('_', '-')}"


@cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("nccl_variables.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def variables() -> Mapping[str, Variable]:
    """Every variable of the table, by name."""
    return {
        name: Variable(
            name, _version(row.get("since", "")), cast(Kind, row["kind"]), row["form"], row.get("default", ""),
            row["does"], cast(State, row.get("state", "")), _version(row.get("changed", "")), row.get("now", ""),
        )
        for name, row in _table()["variables"].items()
    }  # fmt: skip


def newest_release() -> Version:
    """The newest release of NCCL that the table covers."""
    return _version(_table()["release"])


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".")) if text else ()


def parse_version(text: str, where: str) -> Version:
    """Parse a version in the form of NCCL (2.21.5, 2.31.2+cuda12.9), its packages (2.26.2.post1) or its code (22105).

    Raises:
        ToolkitError: `text` is not a version.
    """
    text = text.strip()
    match = _VERSION.fullmatch(text) or _CODE.fullmatch(text)
    if match is None:
        raise ToolkitError(f"expected a version of NCCL, got {text!r}", where=where, fix="write it as 2.21.5")
    return tuple(int(part) for part in match.groups() if part is not None)


def version_text(version: Version) -> str:
    """The version as people write it."""
    return ".".join(map(str, version))


def is_before(version: Version | None, other: Version) -> bool:
    """Whether `version` is known and older than `other`; 2.4 means any 2.4.x, since the page often omits the rest."""
    return version is not None and bool(other) and version[: len(other)] < other
