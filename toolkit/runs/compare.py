"""Compare two runs: configuration, code, versions and results."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.config.amend import with_values
from toolkit.config.document import Flag
from toolkit.config.resolved import ResolvedJob, shown, shown_origin, shown_tables
from toolkit.metrics.own import as_number
from toolkit.metrics.run_metrics import own_name
from toolkit.metrics.training import last_record
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.sweep import values_of_task
from toolkit.runs.record.code_snapshot import Snapshot, differences, read_snapshot
from toolkit.runs.record.job import jobs_of_starts
from toolkit.runs.status.state import run_status

__all__ = ["Comparison", "Row", "changed_lines", "compare_runs", "job_of"]

_VERSIONS = ("toolkit", "python", "interpreter", "host")


@dataclass(frozen=True)
class Row:
    """An item whose values differ between two runs; the value is None for a run that lacks it."""

    key: str
    a: Any
    b: Any
    origin_a: str = ""  # the origin of `a`; "" except for configuration
    origin_b: str = ""


@dataclass(frozen=True)
class Comparison:
    """Two runs or tasks: all results, but only the differences of configuration, code and versions."""

    a: str
    b: str
    configuration: list[Row]
    code: list[Row]
    versions: list[Row]
    result: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON of `diff --json`."""
        value = asdict(self)
        for section in ("code", "versions", "result"):
            value[section] = [
                {name: as_number(one) if isinstance(one := row[name], float) else one for name in ("key", "a", "b")}
                for row in value[section]
            ]
        return value


def compare_runs(a: RunDirectory, b: RunDirectory) -> Comparison:
    """Compare two runs or tasks: each by its last start or, if it has not started, by its next one."""
    jobs = job_of(a), job_of(b)
    records = read_json(a.record), read_json(b.record)
    return Comparison(
        a.run_id,
        b.run_id,
        _configuration(*jobs),
        [*_repository(*(record["code"] for record in records)), *_files(*map(code_of, jobs))],
        _differing(*map(_versions, records)),
        [Row(key, was, is_now) for key, was, is_now in _pairs(_result(a), _result(b))],
    )


def job_of(run: RunDirectory) -> ResolvedJob:
    """Return the job of the last start, or else of the last submission; for a task, with its swept values."""
    # The job is read from the records, because a completed task keeps no `job.json`.
    submitted, starts = jobs_of_starts(run), run.start_numbers()
    if starts:
        first = max(first for first in submitted if first <= starts[-1])
    else:
        has_it = (first for first, job in submitted.items() if run.task_number in (job.job.tasks or ()))
        first = max(has_it, default=max(submitted))
    values = values_of_task(run) or {}
    return with_values(submitted[first], {key: Flag(value, "sweep.json") for key, value in values.items()})


def code_of(job: ResolvedJob) -> tuple[Path, Snapshot] | None:
    """Return the folder and the list of the ranks' code snapshot; None if they start from the job folder."""
    folder = job.code_directory
    snapshot = read_snapshot(folder) if folder is not None else None
    return (folder, snapshot) if folder is not None and snapshot is not None else None


def changed_lines(a: ResolvedJob, b: ResolvedJob) -> Iterator[str]:
    """Yield a unified diff of the files that differ between the snapshots; for a binary file, only its name."""
    before, after = code_of(a), code_of(b)
    if before is None or after is None:
        return
    for name in differences(before[1], after[1]):
        was, is_now = _lines(before[0] / name), _lines(after[0] / name)
        if was is None or is_now is None:
            yield f"{name}: not a text file"
        else:
            yield from difflib.unified_diff(was, is_now, f"a/{name}", f"b/{name}", lineterm="")


def _lines(path: Path) -> list[str] | None:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        return None


def _configuration(a: ResolvedJob, b: ResolvedJob) -> list[Row]:
    def of_side(job: ResolvedJob) -> dict[str, Any]:
        return {key: value for key, value in job.values() if value != {}}  # values in tables have their own keys

    def row(key: str, was: Any, is_now: Any) -> Row:
        return Row(key, shown(key, was), shown(key, is_now), _origin(a, key, was), _origin(b, key, is_now))

    return [row(*pair) for pair in _pairs(of_side(a), of_side(b)) if pair[1] != pair[2]]


def _origin(job: ResolvedJob, key: str, value: Any) -> str:
    """Return the origin of a value; "" if it has none, because no layer sets it (such as the path of the job file)."""
    if value is None or key in ResolvedJob.model_fields:
        return ""
    known = shown_origin(key, job.origin(key))
    return f"{known.layer} {known.detail}".strip()


def _repository(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    def of_side(code: Mapping[str, Any]) -> dict[str, Any]:
        changes = {True: "none", False: "kept"}.get(code.get("clean"), "unknown")  # type: ignore[arg-type]
        changes = "not kept" if "diff_left_out" in code else changes
        return {"commit": code.get("commit"), "uncommitted changes": changes, "diff": code.get("diff")}

    rows = _differing(of_side(a), of_side(b))
    # The diff may be long, so only the fact that it differs is reported.
    return [
        Row("uncommitted changes", "kept", "kept, different") if row.key == "diff" else row
        for row in rows
        if _tells(row)
    ]


def _tells(row: Row) -> bool:
    """Return whether to show a row; `uncommitted changes` already reports a diff in one run only."""
    return row.key != "diff" or (row.a is not None and row.b is not None)


def _files(a: tuple[Path, Snapshot] | None, b: tuple[Path, Snapshot] | None) -> list[Row]:
    if a is None or b is None:
        value = ["none" if side is None else side[1].digest for side in (a, b)]
        return [] if value[0] == value[1] else [Row("copy of the job's folder", *value)]

    def digest(snapshot: Snapshot, name: str) -> str | None:
        return snapshot.files[name].sha256 if name in snapshot.files else None

    return [Row(name, digest(a[1], name), digest(b[1], name)) for name in differences(a[1], b[1])]


def _versions(record: Mapping[str, Any]) -> dict[str, Any]:
    environment = {f"environment.{name}": value for name, value in record["environment"].items()}
    return {**{name: record[name] for name in _VERSIONS}, **shown_tables(environment)}


def _result(run: RunDirectory) -> dict[str, Any]:
    status = run_status(run)
    ends = [end for number in run.attempt_numbers() if (end := AttemptRecord.read(run.attempt(number)))]
    newest = last_record(run.metrics / "train.jsonl")
    result = {
        "state": status.state.value,
        "exit_code": status.exit_code,
        "nodes": status.nodes,
        "ranks": status.ranks,
        "starts": status.starts,
        "attempts": status.attempts,
        "step": status.step,
        "loss": status.metrics.get("loss"),
        "tokens_per_s": newest.tokens_per_s if newest else None,
        "seconds": round(sum(end.seconds or 0.0 for end in ends), 3) if ends else None,
    }
    return result | {own_name(name, result): value for name, value in status.metrics.items() if name != "loss"}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    return [Row(key, was, is_now) for key, was, is_now in _pairs(a, b) if was != is_now]


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*a, *b]):
        yield key, a.get(key), b.get(key)
