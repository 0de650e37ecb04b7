"""A setting of a variable, and a finding about it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.topology.nccl.variables import Level, Variable

__all__ = ["Finding", "Given", "effective"]


@dataclass(frozen=True)
class Given:
    """The value of a variable, and where it is set."""

    name: str
    value: str
    where: str


@dataclass(frozen=True)
class Finding:
    """A problem (`wrong`) or a remark (`note`); `variable` and `value` are empty for findings about a log."""

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
        """The finding as lines for people."""
        about = f"{self.variable}={self.value}" if self.variable else "the log"
        lines = [
            f"{self.level}: {about}  [{self.where}]",
            *([f"  does: {self.does}"] if self.does else []),
            f"  why: {self.why}",
            f"  fix: {self.fix}",
            f"  source: {self.source}",
        ]
        # Control characters in a value would control the terminal.
        return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]


def finding_of(level: Level, given: Given, variable: Variable, why: str, fix: str, source: str = "") -> Finding:
    """A finding about a variable of the table."""
    return Finding(level, given.name, given.value, given.where, variable.does, why, fix, source or variable.source)


def effective(givens: Sequence[Given]) -> Mapping[str, Given]:
    """The effective setting of each variable: the first, since NCCL never overrides one that is already set."""
    chosen: dict[str, Given] = {}
    for given in givens:
        chosen.setdefault(given.name, given)
    return chosen
