"""Here and now: the rendered script as a child of this process, its ranks' output on this terminal."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress

from toolkit.batch.executors import start_local
from toolkit.batch.logs import FOLLOW_PERIOD_S, LogReader, rank_label, rank_logs
from toolkit.batch.submission import uses_slurm
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import RunDirectory

MOST_SHOWN_RANKS = 64


def nodes_of_allocation(environ: Mapping[str, str], asked: str | None) -> str:
    """The nodes of the allocation that we are in; a run here takes all of them.

    Raises:
        ToolkitError: `asked`, which is -N, is another number.
    """
    given = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    if asked not in (None, given):
        raise ToolkitError(
            f"the allocation {environ['SLURM_JOB_ID']} has {given} nodes, and a run here takes all of them",
            where=f"-N {asked}",
            fix=f"leave -N out, or `salloc -N {asked} toolkit run ...`",
        )
    return given


def start_here(run: RunDirectory, job: ResolvedJob) -> subprocess.Popen[bytes]:
    """Start the supervisor in a session of its own, so that the terminal's Ctrl-C reaches it only through us."""
    if uses_slurm(job) and os.environ.get("SLURM_JOB_ID"):
        process, job_id = _start_in_allocation(run), os.environ["SLURM_JOB_ID"]
    else:
        process = start_local(run, run.script(0))
        job_id = f"local-{process.pid}"
    submitted = {"job_id": job_id, "start": 0, "time": utc_now(), "interactive": True}
    write_json(run.path / "submitted-000.json", submitted)
    return process


def _start_in_allocation(run: RunDirectory) -> subprocess.Popen[bytes]:
    path = run.path / f"slurm-{os.environ['SLURM_JOB_ID']}.out"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            ["bash", str(run.script(0))], env={**os.environ, "TOOLKIT_IN_ALLOCATION": "1"}, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(log)


def show_output(
    run: RunDirectory, job: ResolvedJob, supervisor: subprocess.Popen[bytes], write: Callable[[str], object]
) -> None:
    """Print what the ranks print until the supervisor ends. Several ranks are numbered.

    Of more than 64 ranks only the first is shown.
    """
    ranks = job.job.max_nodes * job.job.ranks_per_node
    reader = LogReader(rank_label if ranks > 1 else lambda _: "")
    ended = False
    while not ended:
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(FOLLOW_PERIOD_S)
            ended = True
        for number in run.attempt_numbers():
            shown = rank_logs(run.attempt(number))[: None if ranks <= MOST_SHOWN_RANKS else 1]
            for line in reader.read(shown, to_the_end=ended):
                write(line)
