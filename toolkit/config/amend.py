"""Replace values of a resolved job, for a resume with other resources and for each task of a sweep."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from toolkit.config.argv import SWEPT_ARGUMENT, replace_argument
from toolkit.config.checks import check_alerts, check_arguments, check_request
from toolkit.config.document import Flag, KeyPath, Origin, dotted, leaves
from toolkit.config.entry import check_entry, check_metric
from toolkit.config.refusal import refusal, table_model
from toolkit.config.request import PATHS, Setting, from_command_line, merge, origins_of_site, values_of_site
from toolkit.config.resolved import JobFile, ResolvedJob, derive, derive_parallel
from toolkit.config.site import Site

__all__ = ["amend_job", "move_job", "nodes_after", "vary_job", "with_values"]

_METRIC_KEYS = frozenset({"checkpoint.best", "train.validate_every"})
_ALERT_TABLES = frozenset(
    {"alerts", "notify", "observe"}
)  # the rules of a job of an older version are not checked again


def amend_job(
    recorded: ResolvedJob, *, site: Site, settings: Sequence[str] = (), flags: Mapping[str, Flag] | None = None
) -> ResolvedJob:
    """Return the recorded job with settings and flags applied, checked against its site.

    Values that toolkit derived from others are derived again, for example the ranks from the GPUs.

    Raises:
        ToolkitError: a value is invalid, or the site cannot serve the new request.
    """
    anew = [_with_whole_path(one) for one in from_command_line(settings, flags or {})]
    values, origins = merge([*what_was_set(recorded), *anew])
    amended = _lay_out(recorded, values, origins, site)
    check_entry(amended)
    check_metric(amended)
    check_arguments(amended)
    if not _ALERT_TABLES.isdisjoint(one.path[0] for one in anew):
        check_alerts(amended)
    check_request(amended, site, anew=frozenset(".".join(one.path) for one in anew))
    return amended


def _with_whole_path(setting: Setting) -> Setting:
    """Return a setting whose path, if its value is one, is relative to the current folder, not to the job file."""
    table, *key = setting.path
    is_path = len(key) == 1 and key[0] in PATHS.get(str(table), ()) and isinstance(setting.value, str) and setting.value
    return replace(setting, value=str(Path.cwd() / setting.value)) if is_path else setting


def vary_job(base: ResolvedJob, site: Site, rows: Iterable[Mapping[str, Flag]]) -> Iterator[ResolvedJob]:
    """Yield the base job with the values of each row of a sweep; only the affected parts are checked.

    No row may change [job], because all tasks of an array share its resources.

    Raises:
        ToolkitError: a value is invalid, or the site cannot serve the job with the current row.
    """
    values, origins = merge(what_was_set(base))
    for row in rows:
        varied = _laid_over(base, values, origins, row)
        if not _METRIC_KEYS.isdisjoint(row):  # check_metric is slow, since it parses the script
            check_metric(varied)
        check_arguments(varied)
        if not _ALERT_TABLES.isdisjoint(key.partition(".")[0] for key in row):
            check_alerts(varied)
        # The limits apply to [job], which rows do not change.
        check_request(varied, site, limits=False, anew=frozenset(row))
        yield varied


def with_values(recorded: ResolvedJob, row: Mapping[str, Flag]) -> ResolvedJob:
    """Return a recorded job with the values of one sweep row, which were checked at submission."""
    return _laid_over(recorded, *merge(what_was_set(recorded)), row)


def _laid_over(
    base: ResolvedJob, values: Mapping[str, Any], origins: Mapping[str, Origin], row: Mapping[str, Flag]
) -> ResolvedJob:
    """Return `base` with a row's values, deriving others again; `values` and `origins` are those set in `base`."""
    base = _with_arguments(base, row)
    row = {key: flag for key, flag in row.items() if not key.startswith(SWEPT_ARGUMENT)}
    changed = values
    for key, flag in row.items():
        changed = _with(changed, tuple(key.split(".")), flag.value)
    places = {key: Origin("flag", flag.name) for key, flag in row.items()}
    touched = {key.partition(".")[0] for key in row}
    try:
        tables = {name: _read_table(name, changed[name]) for name in touched}
    except (ValidationError, PydanticCustomError):  # validating the whole job adds the place to the error
        _validate(changed, {**origins, **places}, base)
        raise
    varied = base.model_copy(update={**tables, "origins": {**base.origins, **places}})
    return _derive_again(varied, origins.keys() | places.keys()) if "parallel" in touched else varied


def _with_arguments(base: ResolvedJob, row: Mapping[str, Flag]) -> ResolvedJob:
    """Return `base` with the arguments that a row replaces, in `job.argv` or after `--`; new ones come last."""
    arguments, stated = base.arguments, len(base.job.argv)
    for key, flag in row.items():
        if key.startswith(SWEPT_ARGUMENT):
            name = key.removeprefix(SWEPT_ARGUMENT)
            arguments = replace_argument(arguments, name, str(flag.value), where=flag.name)
    job = base.job.model_copy(update={"argv": arguments[:stated]})
    return base.model_copy(update={"job": job, "argv": arguments[stated:]})


def _read_table(name: str, values: Any) -> Any:
    """Return one table of a job file, validated."""
    if name == "args":
        return JobFile.check_args(values)
    model = table_model(JobFile.model_fields[name].annotation)
    assert model is not None  # only [args] has no model
    return model.model_validate(values)


def _derive_again(varied: ResolvedJob, was_set: Set[str]) -> ResolvedJob:
    """Return the job with [parallel] derived again, except for the keys in `was_set`, which the user set."""
    origins = {
        key: origin for key, origin in varied.origins.items() if key in was_set or not key.startswith("parallel.")
    }
    return derive_parallel(varied.model_copy(update={"origins": origins}))


def _with(table: Mapping[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    """Return a copy of a table with one value replaced at `path`; tables outside the path are not copied."""
    name, *rest = path
    if not rest:
        return {**table, name: value}
    inner = table.get(name)
    return {**table, name: _with(inner if isinstance(inner, dict) else {}, tuple(rest), value)}


def what_was_set(recorded: ResolvedJob) -> list[Setting]:
    """Return the values of a job that are neither built in, nor derived, nor those of the site."""
    content = recorded.model_dump(by_alias=True, include=set(JobFile.model_fields))
    return [
        Setting(path, value, recorded.origin(key))
        for path, value in leaves(content)
        if _was_set(key := _key_of_origin(path, recorded), recorded)
    ]


def _key_of_origin(path: KeyPath, recorded: ResolvedJob) -> str:
    """Return the key whose origin is that of a value; `--set env.vars={A="1"}` sets a table as one."""
    key, table = ".".join(path), ".".join(path[:2])
    return table if key not in recorded.origins and table in recorded.origins else key


def _lay_out(recorded: ResolvedJob, values: Mapping[str, Any], origins: dict[str, Origin], site: Site) -> ResolvedJob:
    """Return the recorded job with new tables and the values derived from them."""
    tables = _validate(values, origins, recorded)
    kept = {  # [[component]] is set as one list, so `origins` lacks the origins of its keys
        key: origin
        for key, origin in recorded.origins.items()
        if _table_of(key) == "component" or _table_of(key) not in JobFile.model_fields
    }
    changes = {name: getattr(tables, name) for name in JobFile.model_fields}
    return derive(recorded.model_copy(update={**changes, "origins": kept | origins}), site)


def _validate(values: Mapping[str, Any], origins: Mapping[str, Origin], recorded: ResolvedJob) -> JobFile:
    try:
        return JobFile.model_validate(values)
    except ValidationError as error:
        recorded_in = Origin("job", str(recorded.job_file))

        def place(path: KeyPath) -> str:
            around = (origins.get(dotted(path[:depth])) for depth in range(len(path), 0, -1))
            return next(filter(None, around), recorded_in).detail

        raise refusal(error, JobFile, place) from error


def move_job(recorded: ResolvedJob, site: Site, environ: Mapping[str, str]) -> ResolvedJob:
    """Return a recorded job with the values of another site; `amend_job` then checks it for that site.

    Raises:
        ToolkitError: a path of the site contains a variable that is not in `environ`.
    """
    of_job = {key: origin for key, origin in recorded.origins.items() if _table_of(key) in JobFile.model_fields}
    moved = {**values_of_site(site, environ), "origins": of_job | origins_of_site(site)}
    return recorded.model_copy(update=moved)


def nodes_after(recorded: ResolvedJob, settings: Sequence[str]) -> int | str:
    """Return the number of nodes of a recorded job after `settings`, without checking it.

    Raises:
        ToolkitError: a setting cannot be parsed.
    """
    given = [one.value for one in from_command_line(settings, {}) if one.path == ("job", "nodes")]
    return given[-1] if given else recorded.nodes


def _table_of(key: str) -> str:
    """Return the table name of a dotted key such as `train.steps` or `component[1].nodes`."""
    return key.partition(".")[0].partition("[")[0]


def _was_set(key: str, recorded: ResolvedJob) -> bool:
    """Return whether the user set the value. The job name always counts as set: the run directory is named after it."""
    origin = recorded.origin(key)
    return key == "job.name" or origin.layer not in ("built-in", "derived", "site")
