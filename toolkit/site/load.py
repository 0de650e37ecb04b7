"""Load site files: merge those that extend another one, and validate them as a Site.

Anything with a slash or ending in .toml is a path, else a name that `files` searches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.config.document import Document, KeyPath, Origin, leaves, read_document
from toolkit.config.refusal import refusal
from toolkit.config.shipped import site_files
from toolkit.config.site import Site
from toolkit.config.table import nearest
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.find import typed_path


def list_sites(environ: Mapping[str, str] = os.environ) -> tuple[list[Site], list[ToolkitError]]:
    """Load every site that has a file; return the valid ones, and the errors of the others."""
    sites, wrong = [], []
    for path in site_files(environ).values():
        try:
            sites.append(load_site(str(path), environ))
        except ToolkitError as error:
            wrong.append(error)
    return sites, wrong


def load_site(name_or_path: str, environ: Mapping[str, str] = os.environ) -> Site:
    """Load one site with everything that it extends.

    Raises:
        NotFoundError: the site does not exist.
        ToolkitError: a value is wrong, or the sites' `extends` are circular.
    """
    path = _find(name_or_path, environ, where="")
    documents = _chain(path, environ)
    values, origins = _merge(documents)

    def place(key: KeyPath) -> str:
        origin = origins.get(".".join(key))
        return origin.detail if origin else documents[-1].place(key)

    try:
        site = Site.model_validate(values)
    except ValidationError as error:
        raise refusal(error, Site, place) from error
    _check_partitions(site, place)
    if site.name != path.stem:
        raise ToolkitError(
            f"expected the file's name {path.stem!r}, got {site.name!r}",
            where=f"{place(('name',))}:name",
            fix=f'name = "{path.stem}"',
        )
    site._origins.update(origins)
    site._file = path
    return site


def _find(name_or_path: str, environ: Mapping[str, str], *, where: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        return typed_path(name_or_path).absolute()
    files = site_files(environ)
    if name_or_path in files:
        return files[name_or_path]
    close = nearest(name_or_path, files)
    fix = f"write {close[0]!r}" if close else f"use one of {', '.join(files)}, or the path of a site file"
    raise NotFoundError(f"site {name_or_path!r} not found", where=where, fix=fix)


def _chain(path: Path, environ: Mapping[str, str]) -> list[Document]:
    """The documents from the site that extends none to the one at `path`."""
    documents = [read_document(path)]
    while (parent := documents[0].values.get("extends", "")) and isinstance(parent, str):
        where = f"{documents[0].place(('extends',))}:extends"
        path = _find(parent, environ, where=where)
        if path in [document.path for document in documents]:
            cycle = " → ".join([*(one.path.stem for one in reversed(documents)), path.stem])
            raise ToolkitError(f"circular `extends`: {cycle}", where=where, fix="remove one of these `extends`")
        documents.insert(0, read_document(path))
    return documents


def _merge(documents: list[Document]) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Merge the documents key by key; a list replaces the earlier one."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for document in documents:
        values.pop("checked", None)  # one site's verification does not apply to another
        origins.pop("checked", None)
        _overlay(values, document.values)
        for path, _ in leaves(document.values):
            origins[".".join(path)] = Origin("site", document.place(path))
    return values, origins


def _overlay(below: dict[str, Any], above: dict[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _overlay(below[name], value)
        else:
            below[name] = value


def _check_partitions(site: Site, place: Any) -> None:
    defaults = [name for name, partition in site.partitions.items() if partition.default]
    if len(defaults) > 1:
        key = ("partitions", defaults[1], "default")
        raise ToolkitError(
            f"{' and '.join(defaults)} are both the default",
            where=f"{place(key)}:{'.'.join(key)}",
            fix="keep `default = true` at only one partition",
        )
