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
    """A problem (level `wrong`) or a remark (level `note`); `variable` and `value` are empty if it is about a log."""

    level: Level
    variable: str
    value: str
    where: str
    does: str
    why: str
    fix: str
    source: str

    def as_json(self) -> dict[str, Any]:
        """Return all fields as a dict."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the finding as lines for display."""
        about = f"{self.variable}={self.value}" if self.variable else "the log"
        lines = [
            f"{self.level}: {about}  [{self.where}]",
            *([f"  does: {self.does}"] if self.does else []),
            f"  why: {self.why}",
            f"  fix: {self.fix}",
            f"  source: {self.source}",
        ]
        # Escape control characters, which could change the state of the terminal.
        return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]


def finding_of(level: Level, given: Given, variable: Variable, why: str, fix: str, source: str = "") -> Finding:
    """Return a finding about a known variable."""
    return Finding(level, given.name, given.value, given.where, variable.does, why, fix, source or variable.source)


def effective(givens: Sequence[Given]) -> Mapping[str, Given]:
    """Return the first setting of each variable: NCCL does not override a variable that is already set."""
    chosen: dict[str, Given] = {}
    for given in givens:
        chosen.setdefault(given.name, given)
    return chosen
