"""Runs as their submission and their supervisors leave them behind, without Slurm."""

import json
from pathlib import Path

from toolkit.rundir.claims import claim_start
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.run_files import RecordedJob, RecordedScheduler, RunFiles, read_folder
from toolkit.runs.status.state_table import HostFacts, Situation, report_state

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"


def claim(run, *, job_id="7", number=0):
    claim_start(run, first=number, job_id=job_id, host="node1", pid=1, process_started=1)


def end_attempt(task, *, start=0, **end):
    """The task's attempt 0 as its supervisor leaves it behind."""
    (task.attempts / "000").mkdir()
    for name, path, more in (
        ("attempt_start", task.attempt(0).start_file, {"start": start}),
        ("attempt_exit", task.attempt(0).exit_file, {"final": True, **end}),
    ):
        write_json(path, {**json.loads((SAMPLES / f"{name}.json").read_text()), **more})


def submitted(toolkit, job_id, name, *, array=""):
    """A run as `submit` leaves it behind, without Slurm."""
    job = toolkit.job("true", name=name)
    toolkit.ok("render", job, "--site", "devcluster", *(("-a", array) if array else ()))
    (path,) = toolkit.runs.glob(f"{name}/*")
    write_json(path / "submitted-000.json", {"job_id": job_id, "start": 0, "time": "2026-11-21T02:48:01.000Z"})
    return RunDirectory(path)


def state_from_slurm(run, job_id, answer):
    """The state of a job, by the claims of a run and Slurm's answer alone."""
    folder = read_folder(run)
    job = RecordedJob("devcluster", RecordedScheduler("slurm", "", ""), "", "", 1, 1)
    return report_state(Situation(RunFiles(folder, folder, job), folder, job_id, answer, HostFacts("here")))


def states_of(told):
    return {task["job_id"]: task["state"] for task in told["tasks"]}


def files_of(run):
    return {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
