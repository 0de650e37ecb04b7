"""Detect the site of this machine, and load site files."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.config.document import Document, KeyPath, Origin, leaves, read_document
from toolkit.config.refusal import refusal
from toolkit.config.shipped import site_files
from toolkit.config.site import Site
from toolkit.config.table import nearest
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.files import typed_path
from toolkit.slurm.commands import prints_commands
from toolkit.terminal.talk import say

__all__ = ["check_exported_conf", "choose_site", "detect_site", "list_sites", "load_site"]


def list_sites(environ: Mapping[str, str] = os.environ) -> tuple[list[Site], list[ToolkitError]]:
    """Load all site files; return the valid sites, and the errors of the other files."""
    sites, wrong = [], []
    for path in site_files(environ).values():
        try:
            sites.append(load_site(str(path), environ))
        except ToolkitError as error:
            wrong.append(error)
    return sites, wrong


def load_site(name_or_path: str, environ: Mapping[str, str] = os.environ) -> Site:
    """Load one site, merged with the sites that it extends.

    Raises:
        NotFoundError: the site does not exist.
        ToolkitError: a value is invalid, or the `extends` keys are circular.
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
            f"expected the file name without .toml, {path.stem!r}, got {site.name!r}",
            where=f"{place(('name',))}:name",
            fix=f'set name = "{path.stem}"',
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
    """Return the document at `path` and those that it extends, with the most basic one first."""
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
    """Merge the documents key by key; later documents take precedence, and lists are replaced as a whole."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for document in documents:
        values.pop("checked", None)  # the verification of a site does not apply to a site that extends it
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
            f"expected one default partition, got {' and '.join(defaults)}",
            where=f"{place(key)}:{'.'.join(key)}",
            fix="keep `default = true` at only one partition",
        )


# The default paths of slurm.conf; the second one is the cached copy on a host in configless mode.
SLURM_CONF_PATHS = (Path("/etc/slurm/slurm.conf"), Path("/run/slurm/conf/slurm.conf"))
SCONTROL_TIMEOUT_S = 10
_CLUSTER_NAME = re.compile(r"^\s*ClusterName\s*=\s*([^\s#]+)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Detection:
    """The site, and the criterion by which it was chosen."""

    site: Site
    reason: str


def choose_site(name: str | None = None, environ: Mapping[str, str] = os.environ) -> Detection:
    """Return the site named by --site, else the one named by TOOLKIT_SITE, else the detected one.

    Raises:
        ToolkitError: no site matches, or several do.
        NotFoundError: the named site does not exist.
    """
    found = Detection(load_site(name, environ), "--site") if name else detect_site(environ)
    own, exported = found.site.scheduler.conf, environ.get("SLURM_CONF", "")
    if own and exported and typed_path(own).resolve() != typed_path(exported).resolve():
        say(f"SLURM_CONF={exported} is ignored: site {found.site.name} uses {own}")
    return found


def detect_site(environ: Mapping[str, str] = os.environ) -> Detection:
    """Detect the site of this machine; TOOLKIT_SITE overrides the detection.

    Raises:
        ToolkitError: sbatch is on PATH but not exactly one site matches, or SLURM_CONF names a missing file.
    """
    if named := environ.get("TOOLKIT_SITE"):
        return Detection(load_site(named, environ), f"TOOLKIT_SITE={named}")
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        return Detection(load_site("local", environ), "no scheduler command (sbatch) on PATH")
    sites, wrong = list_sites(environ)
    for error in wrong:
        say(f"ignoring a site file: {error}")
    sites = [site for site in sites if site.scheduler.kind != "local"]
    ambient = _ambient_cluster(environ)
    host = platform.node()
    means: Sequence[Callable[[Site], str]] = (
        lambda site: _by_environment(site, environ),
        lambda site: _by_cluster(site, ambient),
        lambda site: _by_host(site, host),
        _by_file,
    )
    for matches in means:
        found = [Detection(site, reason) for site in sites if (reason := matches(site))]
        if len(found) == 1:
            return _with_exported_conf(found[0], environ)
        if found:
            both = "; ".join(f"{one.site.name}: {one.reason}" for one in found)
            raise ToolkitError(f"several sites match ({both})", fix="choose one with --site or TOOLKIT_SITE")
    check_exported_conf(environ)
    cluster = f", ClusterName {ambient[0]} ({ambient[1]})" if ambient else ""
    raise ToolkitError(
        f"this machine has a scheduler, but no site file matches it (host {host}{cluster})",
        fix="create one with `toolkit site init`; `toolkit site list` shows the existing ones",
    )


def _with_exported_conf(found: Detection, environ: Mapping[str, str]) -> Detection:
    """Return the site with the slurm.conf in SLURM_CONF if both have the same ClusterName."""
    wanted, exported = found.site.detect.cluster_name, environ.get("SLURM_CONF", "")
    if not wanted or not exported or _cluster_in(Path(exported)) != wanted:
        return found
    return Detection(found.site.with_conf(Path(exported).absolute(), "SLURM_CONF"), found.reason)


def check_exported_conf(environ: Mapping[str, str]) -> None:
    """Check that the file in SLURM_CONF exists; otherwise Slurm commands retry for a minute before they fail.

    Raises:
        ToolkitError: SLURM_CONF names a missing file.
    """
    exported = environ.get("SLURM_CONF", "")
    if exported and not Path(exported).exists():
        raise ToolkitError(
            "file not found", where=f"SLURM_CONF={exported}", fix="export the path of a slurm.conf, or unset SLURM_CONF"
        )


def _by_environment(site: Site, environ: Mapping[str, str]) -> str:
    for name, pattern in site.detect.environment.items():
        if name in environ and fnmatchcase(environ[name], pattern):
            return f"{name}={environ[name]} in the environment"
    return ""


def _by_cluster(site: Site, ambient: tuple[str, str] | None) -> str:
    """Compare the cluster that Slurm commands use here; if there is none, the cluster in the site's slurm.conf."""
    wanted = site.detect.cluster_name
    if not wanted:
        return ""
    if ambient is not None:
        return f"ClusterName {wanted} ({ambient[1]})" if ambient[0] == wanted else ""
    conf = typed_path(site.scheduler.conf) if site.scheduler.conf else None
    if conf is not None and _cluster_in(conf) == wanted:
        return f"ClusterName {wanted} ({conf})"
    return ""


def _by_host(site: Site, host: str) -> str:
    for pattern in site.detect.hostnames:
        if fnmatchcase(host, pattern):
            return f"host {host} matches {pattern}"
    return ""


def _by_file(site: Site) -> str:
    return next((f"{path} exists" for path in site.detect.files if Path(path).exists()), "")


def _ambient_cluster(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (the name of the cluster that Slurm commands use here, its source); None if it is unknown."""
    if name := environ.get("SLURM_CLUSTER_NAME"):
        return name, "SLURM_CLUSTER_NAME"
    paths = [Path(environ["SLURM_CONF"])] if environ.get("SLURM_CONF") else SLURM_CONF_PATHS
    for path in paths:
        if name := _cluster_in(path):
            return name, str(path)
    if environ.get("SLURM_CONF") and not paths[0].exists():
        return None  # do not call scontrol, which would retry for a minute
    name = _cluster_from_scontrol(environ)
    return (name, "scontrol show config") if name else None


def _cluster_in(conf: Path) -> str:
    try:
        text = conf.read_text(errors="replace")
    except OSError:
        return ""  # this host has no such configuration file
    match = _CLUSTER_NAME.search(text)
    return match[1] if match else ""


def _cluster_from_scontrol(environ: Mapping[str, str]) -> str:
    """Query scontrol, for hosts in configless mode, which have no slurm.conf."""
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        return ""
    if prints_commands():
        sys.stderr.write("+ scontrol show config\n")
    try:
        answer = subprocess.run(
            [scontrol, "show", "config"], env=dict(environ), capture_output=True, text=True,
            timeout=SCONTROL_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""  # slurmctld did not respond; other criteria may still match
    match = _CLUSTER_NAME.search(answer.stdout)
    return match[1] if match else ""
