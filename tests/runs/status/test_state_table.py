"""Each row of the table that decides the state of a run, and the files that are opened for it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import SchedulerRefusedError
from toolkit.rundir import run_files
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.claims import StartClaim
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.run_files import (
    AttemptFiles,
    FolderFiles,
    RecordedJob,
    RecordedScheduler,
    RunFiles,
    StartFiles,
    read_run,
)
from toolkit.rundir.states import Cause, Next, RunState
from toolkit.runs.status.state import decide_state
from toolkit.runs.status.state_table import RECORD_SOURCE, STATES, HostFacts
from toolkit.slurm.job_facts import JobFacts

RUN = RunDirectory(Path("/runs/job/20261120-142233-9f3a"))
HERE = {RUN: HostFacts("here", True)}
GONE = {RUN: HostFacts("here", False)}
SLURM = RecordedJob("site", RecordedScheduler("slurm", "", ""), "", "", 2, 8)
LOCAL = replace(SLURM, scheduler=RecordedScheduler("local", "", ""))
SILENT = SchedulerRefusedError("squeue did not answer")


def files(job="7", *, recorded=SLURM, host="here", claimed="", has_ended=False, end=None, cancel=False):
    """A run whose only start is a job, claimed on a host by process 11."""
    submissions = {0: job} if job else {}
    claim = StartFiles(StartClaim(0, job, claimed, 11, 1), has_ended)
    attempt = AttemptFiles(RUN.attempt(0), StartRecord(0, job, 2, 8, ""), end, None) if end is not None else None
    folder = FolderFiles(
        RUN, submissions, dict.fromkeys(submissions, ()), starts={0: claim} if claimed else {}, attempt=attempt,
        attempts=(0,) if attempt else (), asks_cancel=cancel,
    )  # fmt: skip
    return RunFiles(folder, folder, recorded, host=host)


def ended(following=Next.END):
    return AttemptRecord(Cause.CRASHED, following, following is Next.END, RunState.FAILED, 3, "code 3", "", 1, "n1")


def slurm(state, **facts):
    return {"7": JobFacts("7", state, source="squeue", **facts)}


# The arguments of `decide_state` for each row, in the order of the table, with the state and the source.
CASES = (
    (files(""), {}, {}, {"open_submission": "no answer"}, "unknown", "none"),
    (files(""), {}, {}, {"open_submission": "no job", "is_absent": True}, "lost", "Slurm"),
    (files(end=ended(), claimed="n1"), {}, {}, {}, "failed", RECORD_SOURCE),
    (files(""), {}, {}, {}, "created", "run directory"),
    (files("local-11", recorded=LOCAL, host="other"), {}, HERE, {}, "unknown", "run directory"),
    (files("local-11", recorded=LOCAL, cancel=True), {}, HERE, {}, "cancelling", "process table"),
    (files("local-11", recorded=LOCAL), {}, HERE, {}, "pending", "process table"),
    (files("local-11", recorded=LOCAL), {}, GONE, {}, "failed", "process table"),
    (files("local-11", recorded=LOCAL, claimed="here"), {}, GONE, {}, "lost", "process table"),
    (files("local-11", recorded=LOCAL, claimed="here", cancel=True), {}, HERE, {}, "cancelling", "process table"),
    (files("local-11", recorded=LOCAL, claimed="here"), {}, HERE, {}, "running", "process table"),
    (files(recorded=LOCAL), {}, HERE, {}, "unknown", "run directory"),
    (files(), SILENT, {}, {}, "unknown", "none"),
    (files(cancel=True), {}, {}, {}, "cancelled", "run directory"),
    (files(claimed="n1", cancel=True), {}, {}, {}, "lost", "Slurm"),
    (files(claimed="here"), slurm("RUNNING"), GONE, {}, "lost", "process table"),
    (files(claimed="n1", cancel=True), slurm("RUNNING"), HERE, {}, "cancelling", "squeue"),
    (files(claimed="n1", end=ended(Next.REQUEUE)), slurm("COMPLETING"), {}, {}, "pending", "squeue"),
    (files(claimed="n1"), slurm("PENDING", restarts=0), {}, {}, "running", "squeue"),
    (files(claimed="n1"), slurm("COMPLETED"), {}, {}, "lost", "squeue"),
    (files(claimed="n1"), slurm("TIMEOUT"), {}, {}, "timeout", "squeue"),
    (files(), slurm("PENDING", reason="Priority"), {}, {}, "pending", "squeue"),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(STATES)), ids=[row.when for row in STATES])
def test_each_row_decides_its_own_case(number, monkeypatch):
    assert len(CASES) == len(STATES)
    read, answer, processes, submission, state, source = CASES[number]
    status = decide_state(read, answer, processes, **submission)
    assert (status.state.value, status.source) == (state, source), status.reason
    if source != RECORD_SOURCE:  # the reason is that of the record
        rows = [row._replace(reason=lambda _, when=row.when: when) for row in STATES]
        monkeypatch.setattr("toolkit.runs.status.state_table.STATES", rows)
        assert decide_state(read, answer, processes, **submission).reason == STATES[number].when


def test_an_array_has_the_starts_and_attempts_of_its_tasks():
    def task(number: int, starts: int, attempts: int) -> FolderFiles:
        claims = {start: StartFiles(StartClaim(start, f"7_{number}", "n1", 11, 1), False) for start in range(starts)}
        return FolderFiles(RUN.task(number), starts=claims, attempts=tuple(range(attempts)))

    whole = FolderFiles(RUN, {0: "7"}, {0: ()})
    array = RunFiles(whole, whole, replace(SLURM, array="0-1"), {0: task(0, 2, 3), 1: task(1, 1, 1)}, first_array="0-1")
    status = decide_state(array, {f"7_{number}": JobFacts(f"7_{number}", "RUNNING") for number in (0, 1)})
    assert (len(status.tasks or ()), status.starts, status.attempts) == (2, 3, 4)


def test_nothing_is_read_to_decide(monkeypatch):
    def refuse(event, _):
        if event in ("open", "os.listdir", "os.scandir", "subprocess.Popen") and watching:
            raise AssertionError(event)

    watching: list[int] = []
    sys.addaudithook(refuse)
    watching.append(1)
    try:
        states = [decide_state(read, *given, **submission).state.value for read, *given, submission, _, _ in CASES]
    finally:
        watching.clear()
    assert states == [state for *_, state, _ in CASES]


OPENS = """
import json, sys
from pathlib import Path
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.run_files import read_run
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
read_run(RunDirectory(Path(sys.argv[1])))
print(json.dumps(opened))
"""


def test_each_file_is_opened_once_and_never_usage_ranks_or_logs(toolkit):
    run = toolkit.submit(toolkit.job("true"))
    toolkit.ok("wait", run.run_id)
    done = subprocess.run([sys.executable, "-c", OPENS, run.path], capture_output=True, text=True, check=True)
    opened = [str(Path(path).relative_to(run.path)) for path in json.loads(done.stdout) if str(run.path) in path]
    assert sorted(opened) == sorted(set(opened))
    files_of_state = {"record.json", "submitted-000.json", "starts/000/claim.json", "attempts/000/start.json"}
    assert set(opened) - {"attempts/000/heartbeat"} == files_of_state | {"attempts/000/exit.json"}
    assert any(run.path.glob("attempts/000/logs/*")) and any(run.path.glob("attempts/000/ranks/*"))


def test_a_record_without_a_table_of_the_resolved_job_is_damaged():
    required = {name for name, field in ResolvedJob.model_fields.items() if field.is_required()}
    assert set(run_files._TABLES) == required - {"job_file", "job_directory"}


def test_a_heterogeneous_job_has_the_nodes_and_ranks_of_all_components(toolkit):
    toolkit.ok("render", toolkit.job("true", name="plain"))
    (path,) = toolkit.runs.glob("plain/*")
    record = json.loads((path / "record.json").read_text())
    assert (read_run(RunDirectory(path)).job.nodes, read_run(RunDirectory(path)).job.ranks) == (1, 1)
    for nodes, ranks in (("2-4", 3), (1, 2)):
        one = {"job": {**record["job"]["job"], "nodes": nodes, "ranks_per_node": ranks}, "partition_limits": None}
        record["job"]["resolved_components"].append(one)
    (path / "record.json").write_text(json.dumps(record))
    job = read_run(RunDirectory(path)).job
    assert (job.nodes, job.ranks) == (3, 8)
