"""What a check found: a variable, what is wrong with it, and the fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from toolkit.topology.nccl.variable import Variable

Level = Literal["wrong", "note"]


@dataclass(frozen=True)
class Given:
    """A variable as somebody set it, and where."""

    name: str
    value: str
    where: str


@dataclass(frozen=True)
class Finding:
    """`wrong` has not the effect that it was set for, does harm, or was left behind; a `note` is good to know.

    `variable` and `value` are empty for what a log shows.
    """

    level: Level
    variable: str
    value: str
    where: str
    does: str
    why: str
    fix: str
    source: str

    def as_json(self) -> dict[str, Any]:
        """All fields by their names."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The finding for people: what it is about, then why, the fix and the source."""
        about = f"{self.variable}={self.value}" if self.variable else "the log"
        lines = [
            f"{self.level}: {about}  [{self.where}]",
            *([f"  does: {self.does}"] if self.does else []),
            f"  why: {self.why}",
            f"  fix: {self.fix}",
            f"  source: {self.source}",
        ]
        # A value may hold control characters, which would rule the terminal.
        return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]


def found(level: Level, given: Given, known: Variable, why: str, fix: str, source: str = "") -> Finding:
    """A finding about a variable that the table knows."""
    return Finding(level, given.name, given.value, given.where, known.does, why, fix, source or known.source)


def effective(givens: Sequence[Given]) -> Mapping[str, Given]:
    """The setting of each variable that counts: the first, since NCCL overwrites nothing that is set already."""
    chosen: dict[str, Given] = {}
    for given in givens:
        chosen.setdefault(given.name, given)
    return chosen
