"""Where a value came from: its layer, and the place in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# Lowest to highest; a derived value is computed from others after all layers are read.
Layer = Literal["built-in", "site", "environment", "job", "SBATCH_*", "TOOLKIT_*", "flag", "derived"]


@dataclass(frozen=True)
class Origin:
    """`detail` is file:line, a variable, a flag as typed, or the keys that a derived value depends on."""

    layer: Layer
    detail: str = ""

    def place(self, key: str) -> str:
        """Return `where` for an error about `key`."""
        return f"{self.detail}:{key}" if self.detail else key


@dataclass(frozen=True)
class OriginInComponent(Origin):
    """The origin of a component's value that replaces [job]'s: an error names the component's key."""

    number: int = 0

    def place(self, key: str) -> str:
        return super().place(key.replace("job.", f"component[{self.number}].", 1))


@dataclass(frozen=True)
class Flag:
    """One value of the command line and the flag's name, such as "-N". A string is read by the key's type."""

    value: Any
    name: str
