"""Existing site files, unread: a name is searched in the folders of $TOOLKIT_SITES, then in ~/.config/toolkit/sites, then
among the shipped ones.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from toolkit.rundir.find import typed_path


def site_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders of site files, in search order."""
    own = [typed_path(part) for part in environ.get("TOOLKIT_SITES", "").split(os.pathsep) if part]
    return [*own, typed_path("~/.config/toolkit/sites"), *map(Path, import_module("toolkit.site_configs").__path__)]


def site_files(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return every site's file by name; a user's file hides a shipped one of the same name."""
    found: dict[str, Path] = {}
    for folder in site_folders(environ):
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def partitions_in(name_or_path: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The partitions that a site's file itself lists; [] if it cannot be read. `load_site` reports what is wrong."""
    path = site_files(environ).get(name_or_path, typed_path(name_or_path))
    try:
        partitions = tomllib.loads(path.read_text(encoding="utf-8")).get("partitions", {})
    except (OSError, ValueError):
        return []
    return list(partitions) if isinstance(partitions, dict) else []
