"""A resolved job with some values replaced: what a resume on another shape runs, and each task of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from toolkit.config.checks import check_request, check_words
from toolkit.config.derive import derive, derive_parallel
from toolkit.config.document import leaves
from toolkit.config.entry import check_entry
from toolkit.config.layers import Setting, from_command_line, merge
from toolkit.config.lines import KeyPath, dotted
from toolkit.config.metric import check_metric
from toolkit.config.origins import Flag, Origin
from toolkit.config.refusal import refusal, table_model
from toolkit.config.resolved import JobFile, ResolvedJob
from toolkit.config.site import Site
from toolkit.config.site_values import origins_of_site, values_of_site

_OF_A_METRIC = frozenset({"checkpoint.best", "train.validate_every"})


def amend_job(
    recorded: ResolvedJob, *, site: Site, settings: Sequence[str] = (), flags: Mapping[str, Flag] | None = None
) -> ResolvedJob:
    """Lay settings and flags over a resolved job, and check the result against its site.

    What once followed from other values (the ranks from the GPUs, the QOS from the partition) follows anew.

    Raises:
        ToolkitError: a value is wrong, or the site cannot serve the new request.
    """
    anew = list(from_command_line(settings, flags or {}))
    values, origins = merge([*_what_was_set(recorded), *anew])
    amended = _lay_out(recorded, values, origins, site)
    check_entry(amended)
    check_metric(amended)
    check_words(amended)
    check_request(amended, site, anew=frozenset(".".join(one.path) for one in anew))
    return amended


def vary_job(base: ResolvedJob, site: Site, rows: Iterable[Mapping[str, Flag]]) -> Iterator[ResolvedJob]:
    """A resolved job with each row's values laid over it, as `amend_job`, but only what a row touches is looked at.

    No row may change [job], which is the same for all.

    Raises:
        ToolkitError: a value is wrong, or the site cannot serve the job with the row that is reached.
    """
    values, origins = merge(_what_was_set(base))
    for row in rows:
        varied = _laid_over(base, values, origins, row)
        if not _OF_A_METRIC.isdisjoint(row):  # it reads the script
            check_metric(varied)
        check_words(varied)
        check_request(varied, site, limits=False)  # of [job], whose own look that is
        yield varied


def with_values(recorded: ResolvedJob, row: Mapping[str, Flag]) -> ResolvedJob:
    """A recorded job with one row's values laid over it, which were checked when it was submitted."""
    return _laid_over(recorded, *merge(_what_was_set(recorded)), row)


def _laid_over(
    base: ResolvedJob, values: Mapping[str, Any], origins: Mapping[str, Origin], row: Mapping[str, Flag]
) -> ResolvedJob:
    """The job with a row's values, and with what follows from them; `values` and `origins` are what was set before."""
    changed = values
    for key, flag in row.items():
        changed = _with(changed, tuple(key.split(".")), flag.value)
    places = {key: Origin("flag", flag.name) for key, flag in row.items()}
    touched = {key.partition(".")[0] for key in row}
    try:
        tables = {name: _read_table(name, changed[name]) for name in touched}
    except (ValidationError, PydanticCustomError):  # the file as a whole says where
        _validate(changed, {**origins, **places}, base)
        raise
    varied = base.model_copy(update={**tables, "origins": {**base.origins, **places}})
    return _derive_again(varied, origins.keys() | places.keys()) if "parallel" in touched else varied


def _read_table(name: str, values: Any) -> Any:
    """One table of a job file, as the file would have it."""
    if name == "args":
        return JobFile.check_args(values)
    model = table_model(JobFile.model_fields[name].annotation)
    assert model is not None  # of every table but [args]
    return model.model_validate(values)


def _derive_again(varied: ResolvedJob, was_set: Set[str]) -> ResolvedJob:
    """The job with the values that follow from [parallel], unless they were set."""
    origins = {
        key: origin for key, origin in varied.origins.items() if key in was_set or not key.startswith("parallel.")
    }
    return derive_parallel(varied.model_copy(update={"origins": origins}))


def _with(table: Mapping[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    """A copy of a table with one value at a path; what is not on the way is shared."""
    name, *rest = path
    if not rest:
        return {**table, name: value}
    inner = table.get(name)
    return {**table, name: _with(inner if isinstance(inner, dict) else {}, tuple(rest), value)}


def _what_was_set(recorded: ResolvedJob) -> list[Setting]:
    content = recorded.model_dump(by_alias=True, include=set(JobFile.model_fields))
    return [
        Setting(path, value, recorded.origin(".".join(path)))
        for path, value in leaves(content)
        if _was_set(".".join(path), recorded)
    ]


def _lay_out(recorded: ResolvedJob, values: Mapping[str, Any], origins: dict[str, Origin], site: Site) -> ResolvedJob:
    """The recorded job with new tables, and with what follows from them."""
    tables = _validate(values, origins, recorded)
    kept = {  # the components are set as one list, and each key of theirs keeps its place
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
    """A recorded job with another site's values in place of its own; `amend_job` then checks it there.

    Raises:
        ToolkitError: a path of the site has a variable that `environ` lacks.
    """
    of_job = {key: origin for key, origin in recorded.origins.items() if _table_of(key) in JobFile.model_fields}
    moved = {**values_of_site(site, environ), "origins": of_job | origins_of_site(site)}
    return recorded.model_copy(update=moved)


def nodes_after(recorded: ResolvedJob, settings: Sequence[str]) -> int | str:
    """The nodes of a recorded job once settings are laid over it; nothing is checked yet.

    Raises:
        ToolkitError: a setting cannot be read.
    """
    given = [one.value for one in from_command_line(settings, {}) if one.path == ("job", "nodes")]
    return given[-1] if given else recorded.nodes


def _table_of(key: str) -> str:
    """The table of `train.steps` or `component[1].nodes`."""
    return key.partition(".")[0].partition("[")[0]


def _was_set(key: str, recorded: ResolvedJob) -> bool:
    """A value that followed from others is found again; only the name stays, since the run's folder has it."""
    origin = recorded.origin(key)
    return key == "job.name" or origin.layer not in ("built-in", "derived", "site")
