"""Arguments and output of well-known programs, by name, from `presets.toml`."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from toolkit.config.table import nearest, refuse_value

__all__ = ["Preset", "preset", "presets"]


@dataclass(frozen=True)
class Preset:
    """One program: how it continues from what it saved, and what its output says. The lists are empty if it has none.

    imports: modules (`torch`), or names in a module (`model:GPTConfig`), by which its scripts are recognized.
    parsers: those by which scripts are recognized that accept `argv`; if there are none, all of them do.
    argv: for `restart.argv`. progress: for `restart.progress`. step_line: for `observe.step_line`.
    """

    imports: list[str]
    parsers: list[str]
    argv: list[str]
    progress: str
    step_line: list[str]


@cache
def presets() -> dict[str, Preset]:
    """Return all presets by name."""
    text = files("toolkit.config").joinpath("presets.toml").read_text(encoding="utf-8")
    empty = {"imports": [], "parsers": [], "argv": [], "progress": "", "step_line": []}
    return {name: Preset(**(empty | values)) for name, values in tomllib.loads(text).items()}


def preset(name: str, part: str) -> list[str]:
    """Return the list `part` of a preset, "argv" or "step_line".

    Raises:
        PydanticCustomError: there is no such preset, or it has no such part. For validators of keys.
    """
    known = {one: getattr(preset, part) for one, preset in presets().items() if getattr(preset, part)}
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near[0]}? " if near else ""
        raise refuse_value(
            (), f"expected a list, or a preset of {', '.join(known)}, got {name!r}", f"{hint}write a list"
        )
    return list(known[name])
