"""Resolve a job request: merge the job file, the site file, environment variables and flags, and check the result."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from toolkit.config.checks import check_alerts, check_arguments, check_request
from toolkit.config.document import Document, Flag, KeyPath, Layer, Origin, dotted, leaves, read_document
from toolkit.config.entry import check_entry, check_metric
from toolkit.config.env import check_allocator
from toolkit.config.job import is_job_name, valid_job_name
from toolkit.config.presets import presets
from toolkit.config.program_document import NOT_A_JOB, document_of_program, is_program
from toolkit.config.rank_count import flags_of_ranks, needs_nodes
from toolkit.config.refusal import refusal
from toolkit.config.resolved import JobFile, ResolvedJob, derive
from toolkit.config.script_document import document_of_script
from toolkit.config.shipped import find_job, read_user_defaults
from toolkit.config.site import DetectTable, PathsTable, Site, SiteIdentity
from toolkit.config.texts import TABLES, read_text
from toolkit.errors import ToolkitError
from toolkit.rundir.files import typed_path
from toolkit.slurm.batch_script import is_batch_script
from toolkit.slurm.sbatch_options import value_of
from toolkit.slurm.sbatch_table import KEYS_OF_VARIABLES, SBATCH_OPTIONS, SWITCH_VARIABLES

__all__ = [
    "JobRequest", "expand_path", "from_command_line", "resolve", "resolve_job", "site_of_record", "with_rank_flags",
]  # fmt: skip


@dataclass(frozen=True)
class JobRequest:
    """What a user requests, before any file or cluster is read.

    `job` is a job file, the name of a shipped job or, for `resume` and `rerun`, the name of a run. `flags` set keys such as
    "job.nodes". `settings` are `table.key=value` strings, as in --set. `ranks` is the total number of ranks (-n).
    `sbatch_options` apply to this submission only. `argv` contains the arguments after `--`, and is None without a `--`.
    `site` is a site name or file, `runs` the folder of all runs. `sweeps`, `grid` and `after` are the options of the same
    names. `calls` describes the function and the arguments of each task of an executor.
    """

    job: str
    settings: tuple[str, ...] = ()
    flags: Mapping[str, Flag] = field(default_factory=dict)
    ranks: int | None = None
    argv: tuple[str, ...] | None = None
    site: str | None = None
    runs: Path | None = None
    sweeps: tuple[str, ...] = ()
    grid: Path | None = None
    after: tuple[str, ...] = ()
    sbatch_options: tuple[str, ...] = ()
    calls: Mapping[str, Any] | None = None

    def typed(self, key: str) -> Any:
        """Return the value of the flag that sets `key`; None if there is none."""
        flag = self.flags.get(key)
        return None if flag is None else flag.value

    def with_flags(self, flags: Mapping[str, Flag]) -> JobRequest:
        """Return the request with `flags` added; they override existing flags for the same keys."""
        return replace(self, flags={**self.flags, **flags})


def resolve(
    request: JobRequest, site: Site | None, *, environ: Mapping[str, str] = os.environ, limits: bool = True
) -> ResolvedJob:
    """Return the requested job resolved for a site; if `site` is None, without partitions and their limits.

    With `limits` False, the caller checks the partition limits by a query to the cluster.

    Raises:
        ToolkitError: a value is invalid, or the site cannot serve the request.
        NotFoundError: the job file does not exist.
    """
    request = with_rank_flags(request, environ)
    return resolve_job(
        find_job(request.job), site=site, environ=environ, settings=request.settings, flags=request.flags,
        argv=request.argv or (), limits=limits,
    )  # fmt: skip


def with_rank_flags(request: JobRequest, environ: Mapping[str, str] = os.environ) -> JobRequest:
    """Return the request with -n replaced by a flag for the number of nodes or for the ranks per node.

    Raises:
        ToolkitError: the ranks are not divisible by the nodes.
    """
    if request.ranks is None:
        return request
    nodes, each = request.typed("job.nodes"), request.typed("job.ranks_per_node")
    stated = resolve(replace(request, ranks=None), None, environ=environ)
    if stated.job.ranks:
        return replace(request.with_flags({"job.ranks": Flag(request.ranks, "-n")}), ranks=None)
    if needs_nodes(request.ranks, nodes, each):
        nodes = stated.nodes
    return replace(request.with_flags(flags_of_ranks(request.ranks, nodes, each)), ranks=None)


@dataclass(frozen=True)
class Setting:
    """A value for one key of the job, and where it was set."""

    path: KeyPath
    value: Any
    origin: Origin


def resolve_job(
    job_file: Path,
    *,
    site: Site | None,
    environ: Mapping[str, str],
    settings: Sequence[str] = (),
    flags: Mapping[str, Flag] | None = None,
    argv: Sequence[str] = (),
    limits: bool = True,
) -> ResolvedJob:
    """Read a job file, merge all layers, and check the result against the site.

    Args:
        site: None if no site is known; partitions are then neither known nor checked.
        environ: the environment variables, with SBATCH_* and TOOLKIT_<TABLE>_<KEY>.
        settings: TABLE.KEY=VALUE strings, as in --set.
        flags: flags by the dotted key that they set.
        argv: the arguments after `--`, which the entry receives unchanged.
        limits: False if the caller checks the partition limits by a query to the cluster.

    Raises:
        ToolkitError: a value is invalid, or the site cannot serve the request; the error contains the place and the fix.
        NotFoundError: the job file does not exist.
    """
    document, defaults = _document(job_file.absolute()), read_user_defaults(environ)
    values, origins = merge(
        [
            Setting(("job", "name"), document.path.stem, Origin("derived", f"the name of {document.path}")),
            *(_from_document(defaults, "user") if defaults is not None else ()),
            *_from_document(document, "job"),
            *_from_sbatch(environ),
            *_from_toolkit(environ),
            *from_command_line(settings, flags or {}),
        ]
    )

    _drop_overridden_options(values, origins)
    origins |= _origins_of_components(document)

    def place(path: KeyPath) -> str:
        around = (origins.get(dotted(path[:depth])) for depth in range(len(path), 0, -1))
        origin = next(filter(None, around), None)  # the keys inside `--set env.vars={...}` have no origin
        return origin.detail if origin else document.place(path)

    _check_file_name(document.path, origins)
    try:
        tables = JobFile.model_validate(values)
    except ValidationError as error:
        raise refusal(error, JobFile, place) from error
    any_site = site or Site(name="none")
    resolved = derive(_join(tables, any_site, environ, document.path, argv, origins), any_site)
    check_entry(resolved)
    check_metric(resolved)
    check_arguments(resolved)
    check_alerts(resolved)
    check_allocator(resolved.env, resolved.site_env.vars)
    if site is not None:
        check_request(resolved, site, limits=limits)
    return resolved


def _document(path: Path) -> Document:
    """Return the values of a job file, or of a program or a batch script as a job file."""
    if path.suffix != ".toml" and is_program(path):
        return document_of_program(path)
    is_script = path.suffix in (".sh", ".bash", ".sbatch", ".slurm") or (
        path.suffix != ".toml" and is_batch_script(path)
    )
    try:
        return document_of_script(path) if is_script else read_document(path)
    except ToolkitError as error:
        if is_script or path.suffix in ("", ".toml") or not path.is_file():
            raise
        is_notebook = path.suffix == ".ipynb"
        fix = (
            "`jupyter nbconvert --to script` makes a .py of it"
            if is_notebook
            else "write entry = [...] into a job file"
        )
        raise ToolkitError(NOT_A_JOB, where=str(path), fix=fix) from error


def _drop_overridden_options(values: dict[str, Any], origins: Mapping[str, Origin]) -> None:
    """Remove the options of a batch script that a variable or a flag overrides by the key of the same option.

    `restart.warn_s` overrides only the time of --signal: the supervisor still sends the signal.
    """
    job = values.get("job")
    if not isinstance(job, dict) or not job.get("once") or not isinstance(job.get("sbatch"), list):
        return
    overridden = [
        (one.long, one.letter)
        for one in SBATCH_OPTIONS
        if one.long != "signal"
        and (origin := origins.get(one.key))
        and origin.layer in ("SBATCH_*", "TOOLKIT_*", "flag")
    ]
    job["sbatch"] = [one for one in job["sbatch"] if all(value_of(one, *names) is None for names in overridden)]


def _check_file_name(path: Path, origins: Mapping[str, Origin]) -> None:
    """Check the name of the job file if the job is named after it; it may contain invalid characters."""
    origin = origins.get("job.name")
    if origin is not None and origin.layer == "derived" and not is_job_name(path.stem):
        name = valid_job_name(path.stem)
        raise ToolkitError(
            f"{path.stem!r} is not a valid job name, and [job] does not set one",
            where=str(path),
            fix=f'write name = "{name}" in [job], or use -J {name}',
        )


PATHS = {"checkpoint": ["source"], "adapters": ["base", "source"]}  # keys that name files, by table


def _join(
    tables: JobFile,
    site: Site,
    environ: Mapping[str, str],
    job_file: Path,
    argv: Sequence[str],
    origins: dict[str, Origin],
) -> ResolvedJob:
    own: dict[str, Any] = {name: getattr(tables, name) for name in JobFile.model_fields}
    for name, keys in PATHS.items():
        own[name] = own[name].model_copy(update=_lasting(own[name], name, keys, origins))
    return ResolvedJob(
        job_file=job_file, job_directory=job_file.parent, argv=list(argv), **own, **values_of_site(site, environ),
        origins=origins | origins_of_site(site),
    )  # fmt: skip


def _lasting(table: BaseModel, name: str, keys: Sequence[str], origins: Mapping[str, Origin]) -> dict[str, str]:
    """Return the paths that are not of the job file as absolute ones: a later start may have another working directory."""
    given = {key: origins.get(f"{name}.{key}") or origins.get(name) for key in keys if getattr(table, key)}
    elsewhere = [key for key, origin in given.items() if origin is not None and origin.layer != "job"]
    return {key: str(Path.cwd() / getattr(table, key)) for key in elsewhere}


def _from_document(document: Document, layer: Layer) -> Iterator[Setting]:
    for path, value in leaves(document.values):
        yield Setting(path, value, Origin(layer, document.place(path)))


def _origins_of_components(document: Document) -> dict[str, Origin]:
    """Return the origin of each key of each component; `_from_document` yields the list of components as one value."""
    tables = document.values.get("component")
    paths = [
        ("component", str(number), name)
        for number, table in enumerate(tables if isinstance(tables, list) else ())
        for name in (table if isinstance(table, dict) else ())
    ]
    return {dotted(path): Origin("job", document.place(path)) for path in paths}


def _from_sbatch(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, path in KEYS_OF_VARIABLES.items():
        if environ.get(name):
            yield Setting(path, read_text(path, environ[name], where=name), Origin("SBATCH_*", name))
    for name, value in SWITCH_VARIABLES.items():
        if name in environ:
            yield Setting(("job", "requeue"), value, Origin("SBATCH_*", name))


def _from_toolkit(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name in sorted(environ):
        table, _, key = name.removeprefix("TOOLKIT_").lower().partition("_")
        if not name.startswith("TOOLKIT_") or table not in TABLES or not key:
            continue  # other code reads TOOLKIT_SITE, TOOLKIT_RUNS and the like
        path = (table, key)
        yield Setting(path, read_text(path, environ[name], where=name), Origin("TOOLKIT_*", name))


def from_command_line(settings: Iterable[str], flags: Mapping[str, Flag]) -> Iterator[Setting]:
    """Yield the values of --set, then those of the flags, which take precedence."""
    yield from _from_settings(settings)
    yield from _from_flags(flags)


def _from_settings(settings: Iterable[str]) -> Iterator[Setting]:
    for setting in settings:
        key, equals, text = setting.partition("=")
        where = f"--set {setting}"
        path = tuple(part.strip() for part in key.split("."))
        if not equals or len(path) < 2 or not all(path):
            raise ToolkitError(
                f"expected TABLE.KEY=VALUE, got {setting!r}", where="--set", fix="write --set train.steps=100"
            )
        yield Setting(path, read_text(path, text, where=where), Origin("flag", where))


def _from_flags(flags: Mapping[str, Flag]) -> Iterator[Setting]:
    for key, flag in flags.items():
        path = tuple(key.split("."))
        where = f"{flag.name} {flag.value}"
        value = read_text(path, flag.value, where=where) if isinstance(flag.value, str) else flag.value
        yield Setting(path, value, Origin("flag", where))


def merge(layered: Iterable[Setting]) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Return the values and origins of all settings; a later setting replaces earlier ones of its key or table."""
    kept: dict[KeyPath, Setting] = {}
    replaced: dict[KeyPath, list[Origin]] = {}
    for setting in layered:
        path = setting.path
        for other in [old for old in kept if old[: len(path)] == path or path[: len(old)] == old]:
            replaced.setdefault(other, []).append(kept.pop(other).origin)
        kept[path] = setting
    _add_files_of_preset(kept, replaced.get(("restart", "argv"), ()))
    values: dict[str, Any] = {}
    for path, setting in kept.items():
        table = values
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = setting.value
    return values, {".".join(path): setting.origin for path, setting in kept.items()}


def _add_files_of_preset(kept: dict[KeyPath, Setting], replaced: Iterable[Origin]) -> None:
    """Set `restart.progress`, unless it is set, to the files from which the program that `restart.argv` names continues.

    Files that a replaced `restart.argv` named, by its origin in `replaced`, are not set.
    """
    argv, path = kept.get(("restart", "argv")), ("restart", "progress")
    known = presets().get(argv.value) if argv is not None and isinstance(argv.value, str) else None
    if argv is None or known is None or not known.progress:
        return
    if path not in kept or kept[path].origin in replaced:
        kept[path] = Setting(path, known.progress, argv.origin)


def values_of_site(site: Site, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the site by the field names of a resolved job.

    Raises:
        ToolkitError: a path of the site contains a variable that is not in `environ`.
    """
    return {
        "site": SiteIdentity(**{name: getattr(site, name) for name in SiteIdentity.model_fields}),
        "scheduler": site.scheduler,
        "launcher": site.launcher,
        "gpu": site.gpu,
        "site_env": site.env,
        "network": site.network,
        "paths": expand_paths(site, environ),
        "site_container": site.container,
    }


def site_of_record(job: ResolvedJob) -> Site:
    """Return the site that a resolved job records, with only the partition of the job."""
    limits = job.partition_limits
    partitions = {job.job.partition: limits.model_copy(update={"default": True})} if limits else {}
    detect = DetectTable(cluster_name=job.job.cluster if limits else "")  # the cluster of the recorded partition
    return Site(
        **dict(job.site), scheduler=job.scheduler, launcher=job.launcher, gpu=job.gpu, env=job.site_env,
        network=job.network, paths=job.paths, container=job.site_container, partitions=partitions, detect=detect,
    )  # fmt: skip


def origins_of_site(site: Site) -> dict[str, Origin]:
    """Return the origins of the site's values by their keys in a resolved job."""
    renamed: dict[str, Origin] = {}
    for name, origin in site.origins.items():
        first = name.partition(".")[0]
        if first in ("env", "container"):  # the job has tables with the same names
            renamed[f"site_{name}"] = origin
        elif "." not in name:
            renamed[f"site.{name}"] = origin
        elif first not in ("partitions", "detect"):
            renamed[name] = origin
    return renamed


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


def expand_paths(site: Site, environ: Mapping[str, str]) -> PathsTable:
    """Return the paths of the site, with variables in `runs` and `scratch` expanded.

    `local_scratch` is not expanded here, because its variables have their values on the node.

    Raises:
        ToolkitError: a variable is not set.
    """
    expanded = {key: expand_path(site, key, environ) for key in ("runs", "scratch")}
    return site.paths.model_copy(update=expanded)


def expand_path(site: Site, key: str, environ: Mapping[str, str]) -> str:
    """Return one path of `[paths]` with its variables expanded.

    Raises:
        ToolkitError: a variable is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in environ:
            raise ToolkitError(
                f"${name} is not set",
                where=site.origins.get(f"paths.{key}", Origin("built-in")).place(f"paths.{key}"),
                fix=f"export {name}, or write the path without it",
            )
        return environ[name]

    text: str = getattr(site.paths, key)
    return str(typed_path(_VARIABLE.sub(value, text))) if text else ""
