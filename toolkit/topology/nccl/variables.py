"""Read the table of NCCL environment variables in nccl_variables.toml, and parse NCCL versions."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple, cast

from toolkit.errors import ToolkitError

__all__ = ["Version", "parse_version"]

Version = tuple[int, ...]
Level = Literal["wrong", "note"]
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
    """A variable in nccl_variables.toml; the comment at the top of that file defines the fields. An unknown version is ()."""

    name: str
    kind: Kind
    form: str
    does: str
    since: Version = ()
    default: str = ""
    state: State = ""
    changed: Version = ()
    now: str = ""
    harm: str = ""
    instead: str = ""

    @property
    def source(self) -> str:
        """The URL of the documentation of the variable."""
        if self.kind == "torch":
            return TORCH_PAGE
        if self.kind == "undocumented":
            return PAGE
        return f"{PAGE}#{_SECTIONS.get(self.name) or self.name.lower().replace('_', '-')}"


@dataclass(frozen=True)
class Rule:
    """A rule in nccl_variables.toml; comments there define the fields. `advice` is (reason, fix)."""

    variables: tuple[str, ...]
    when: tuple[str, ...]
    before: Version
    since: Version
    level: Level
    advice: tuple[str, str]


class Pattern(NamedTuple):
    """A regular expression with a reason and a fix, for values that do not match it or for log lines that match it."""

    pattern: str
    why: str
    fix: str


@cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("nccl_variables.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def variables() -> Mapping[str, Variable]:
    """Return every variable of the table by name."""
    versions = ("since", "changed")
    return {
        name: Variable(name=name, **row | {key: _version(row[key]) for key in versions if key in row})
        for name, row in _table()["variables"].items()
    }


@cache
def rules() -> tuple[Rule, ...]:
    """Return every rule of the table."""
    return tuple(
        Rule(
            tuple(row["variables"]),
            tuple(row["when"]),
            _version(row.get("before", "")),
            _version(row.get("since", "")),
            cast(Level, row.get("level", "wrong")),
            (row["why"], row["fix"]),
        )
        for row in _table()["rules"]
    )


@cache
def forms() -> Mapping[str, Pattern]:
    """Return the forms of values that are defined by a pattern, by name."""
    return {name: Pattern(**row) for name, row in _table()["forms"].items()}


@cache
def log_reasons() -> tuple[Pattern, ...]:
    """Return the patterns of NCCL messages that explain why NCCL does not use a network."""
    return tuple(Pattern(**row) for row in _table()["log_reasons"])


def newest_release() -> Version:
    """Return the newest release of NCCL that the table covers."""
    return _version(_table()["release"])


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".")) if text else ()


def parse_version(text: str, where: str) -> Version:
    """Parse a version as NCCL (2.21.5, 2.31.2+cuda12.9), its packages (2.26.2.post1) or NCCL_VERSION_CODE (22105) has it.

    Raises:
        ToolkitError: `text` is not a version.
    """
    text = text.strip()
    match = _VERSION.fullmatch(text) or _CODE.fullmatch(text)
    if match is None:
        raise ToolkitError(f"expected an NCCL version, got {text!r}", where=where, fix="write the version as 2.21.5")
    return tuple(int(part) for part in match.groups() if part is not None)


def version_text(version: Version) -> str:
    """Return the version as a string such as 2.21.5."""
    return ".".join(map(str, version))


def is_before(version: Version | None, other: Version) -> bool:
    """Return whether `version` is known and older than `other`; an `other` of 2.4 means any 2.4.x."""
    return version is not None and bool(other) and version[: len(other)] < other
