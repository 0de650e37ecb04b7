"""All runs below RUNS, the newest first, with one question to Slurm for all that still live."""

from __future__ import annotations

from pathlib import Path

from toolkit.batch.state import RunStatus, run_status
from toolkit.batch.submission import recorded_job, slurm_of, uses_slurm
from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.find import iterate_runs, job_ids
from toolkit.rundir.layout import RunDirectory
from toolkit.slurm.commands import JobFacts, Slurm


def list_runs(runs: Path, *, job: str = "", limit: int = 0) -> list[RunStatus]:
    """The status of each run, newest first; `job` filters by job name, `limit` 0 lists all."""
    chosen = [run for run in iterate_runs(runs) if not job or run.job_name == job]
    chosen = chosen[:limit] if limit else chosen
    facts = _ask_once(chosen)
    return [run_status(run, facts.get(_cluster(run), {}) if facts is not None else None) for run in chosen]


def _cluster(run: RunDirectory) -> str:
    return slurm_of(recorded_job(run)).configuration


def _ask_once(chosen: list[RunDirectory]) -> dict[str, dict[str, JobFacts]] | None:
    """Slurm's facts by cluster and job id, one query a cluster; None when a cluster does not answer."""
    wanted: dict[str, list[str]] = {}
    for run in chosen:
        ids = job_ids(run)
        attempt = run.last_attempt()
        ended = bool(attempt and (read_json_or_none(attempt.exit_file) or {}).get("final"))
        if ids and ids[-1].isdigit() and not ended and uses_slurm(recorded_job(run)):
            wanted.setdefault(_cluster(run), []).append(ids[-1])
    try:
        return {cluster: Slurm(cluster).jobs(ids) for cluster, ids in wanted.items()}
    except (SchedulerRefusedError, NotFoundError):
        return None  # each run then says for itself that Slurm does not answer
