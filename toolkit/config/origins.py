"""Where a value came from: its layer, and the place in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# Lowest to highest; a derived value is worked out from others after all layers are read.
Layer = Literal["built-in", "site", "environment", "job", "SBATCH_*", "TOOLKIT_*", "flag", "derived"]


@dataclass(frozen=True)
class Origin:
    """`detail` is file:line, a variable, a flag as it was typed, or the keys that a derived value follows."""

    layer: Layer
    detail: str = ""

    def place(self, key: str) -> str:
        """Return `where` for an error about `key`."""
        return f"{self.detail}:{key}" if self.detail else key


@dataclass(frozen=True)
class OriginInComponent(Origin):
    """Of what a component has in place of [job]'s: an error names its own key."""

    number: int = 0

    def place(self, key: str) -> str:
        return super().place(key.replace("job.", f"component[{self.number}].", 1))


@dataclass(frozen=True)
class Flag:
    """One value of the command line and its flag, such as "-N". A string is parsed by the key's type."""

    value: Any
    name: str
