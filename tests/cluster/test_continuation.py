"""How runs go on without a requeue of ours: follow-up jobs, tasks of an array, a limit that was moved."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from clusters import RELEASE
from on_slurm import Site, is_stepping, stopped_slurmctld, wait_for

from toolkit.devcluster import cluster as devcluster
from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster


def exit_of(run: RunDirectory, attempt: int) -> dict[str, object]:
    wait_for(run.attempt(attempt).exit_file.exists)
    return dict(json.loads(run.attempt(attempt).exit_file.read_text()))


def path_without_scontrol(folder: Path) -> Path:
    """As on a node where users' commands are not all installed."""
    folder.mkdir()
    for command in ("srun", "sbatch", "squeue", "sinfo", "bash", "env"):
        (folder / command).symlink_to(str(shutil.which(command)))
    return folder


@pytest.mark.evidence
def test_where_nobody_can_requeue_a_follow_up_job_goes_on(here: Site) -> None:
    binaries = path_without_scontrol(here.folder / "bin")
    with here.file.open("a") as site:
        site.write(f'[env]\nsetup = ["PATH={binaries}"]\n')
    job, enough = here.stepping()
    job_id, run = here.submit(job)
    wait_for(is_stepping(run, 0))
    here.command(["scancel", "--signal=USR2", "--batch", job_id])
    end = exit_of(run, 0)
    assert (end["cause"], end["next"], end["final"]) == ("walltime", "follow_up", False)
    wait_for(run.submitted(1).exists)
    following = json.loads(run.submitted(1).read_text())["job_id"]
    assert following != job_id
    wait_for(run.attempt(1).heartbeat.exists)
    status = here.status(run)
    assert (status["state"], status["job_id"], status["starts"]) == ("running", following, 2)
    enough.touch()
    assert here.wait(run).returncode == 0


def test_a_task_of_an_array_requeues_itself_only(here: Site) -> None:
    job, enough = here.stepping('array = "0-1"', time="0:10:00")
    job_id, run = here.submit(job)
    tasks = [run.task(0), run.task(1)]
    for task in tasks:
        wait_for(task.attempt(0).heartbeat.exists)
    here.command(["scontrol", "update", f"JobId={job_id}_1", "TimeLimit=2"])  # so that the warning is not early
    # The last task's own number is the array's: a requeue by that number would take both.
    here.command(["scancel", "--signal=USR2", "--batch", f"{job_id}_1"])
    end = exit_of(tasks[1], 0)
    assert (end["cause"], end["next"]) == ("walltime", "requeue")
    restarts = here.command(["squeue", "-h", "-j", job_id, "-r", "-O", "ArrayTaskID:.5,RestartCnt:.5"]).stdout
    wait_for(lambda: tasks[1].start_numbers() == [0, 1] or requeued_once(here, f"{job_id}_1"))
    assert requeued_once(here, f"{job_id}_1"), restarts
    assert not requeued_once(here, f"{job_id}_0")
    assert tasks[0].attempt_numbers() == [0]
    enough.touch()
    wait_for(tasks[0].attempt(0).exit_file.exists)
    assert exit_of(tasks[0], 0)["cause"] == "completed"
    here.command(["scancel", job_id])


def requeued_once(here: Site, job: str) -> bool:
    return "Restarts=1 " in here.command(["scontrol", "-o", "show", "job", job]).stdout


def test_usr2_is_judged_by_the_limit_of_now(here: Site) -> None:
    """A day was left when the job began; its user has cut that to two minutes since."""
    job, enough = here.stepping(time="1-00:00:00")
    job_id, run = here.submit(job)
    wait_for(is_stepping(run, 0))
    assert here.command(["scontrol", "update", f"JobId={job_id}", "TimeLimit=2"]).returncode == 0
    here.command(["scancel", "--signal=USR2", "--batch", job_id])
    assert exit_of(run, 0)["cause"] == "walltime"
    here.command(["scancel", job_id])
    enough.touch()


def test_a_slurmctld_that_is_away_ends_no_run(here: Site) -> None:
    """When ranks are to be started again, which then waits and spends nothing, and at walltime."""
    srun_exits = RELEASE != "26.05"  # there a step ends only after slurmctld has confirmed it
    job, _ = here.stepping(time="0:10:00", tables="[restart]\ncrashes = 1\n")
    job_id, run = here.submit(job)
    wait_for(is_stepping(run, 0))
    log = run.path / f"slurm-{job_id}.out"
    guard = json.loads(run.attempt(0).rank_file(0).read_text())
    with stopped_slurmctld(here.cluster):
        assert here.cluster.exec(guard["host"], ["kill", "-9", str(guard["pid"])]).returncode == 0
        if srun_exits:
            wait_for(lambda: "Slurm's controller does not respond (srun: error: " in log.read_text())
    wait_for(is_stepping(run, 1))
    assert log.read_text().count("Slurm's controller ") == 2 * srun_exits  # once that it is away, once that it is back
    assert here.status(run)["state"] == "running" and run.attempt_numbers() == [0, 1]

    here.command(["scontrol", "update", f"JobId={job_id}", "TimeLimit=3"])
    here.command(["scancel", "--signal=USR2", "--batch", job_id])
    wait_for(lambda: "stop_requested" in log.read_text())  # by then USR2 has come, and the ranks need a moment more
    with stopped_slurmctld(here.cluster):
        wait_for(lambda: "retrying the requeue" in log.read_text())
    wait_for(lambda: requeued_once(here, job_id))
    end = exit_of(run, 1)
    assert (end["cause"], end["next"], end["final"]) == ("walltime", "requeue", False)
    here.command(["scancel", job_id])


def test_a_save_on_request_and_the_run_goes_on(here: Site) -> None:
    (here.folder / "saving.py").write_text(
        "import time\ndef main(world, config):\n    step = 0\n    while not world.should_stop(step):\n"
        "        step += 1\n        time.sleep(0.05)\n"
        "        if world.should_save():\n            print('saved on', world.rank, 'at', step, flush=True)\n"
    )
    job = here.folder / "saving.toml"
    job.write_text('[job]\nentry = "saving.py:main"\nnodes = 2\nranks_per_node = 1\ntime = "5"\n')
    _, run = here.submit(job)
    wait_for(is_stepping(run, 0))
    assert "saves at its next step" in here.ok("save", run.run_id)
    logs = [run.attempt(0).log_file(rank) for rank in (0, 1)]
    wait_for(lambda: all("saved on" in log.read_text() for log in logs))
    assert not (run.control / "save").exists()
    said = [log.read_text().strip().rpartition(" at ")[2] for log in logs]
    assert said[0] == said[1]  # the same step on all ranks
    here.ok("stop", run.run_id)
    assert here.wait(run).returncode == 130
    assert here.status(run)["state"] == "stopped"
    refused = here.toolkit("save", run.run_id)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "was stopped, so it cannot save" in refused.stderr


def test_a_run_is_requeued_on_request_and_has_saved(here: Site) -> None:
    job, _ = here.stepping()
    job_id, run = here.submit(job)
    wait_for(is_stepping(run, 0))
    asked = here.toolkit("requeue", run.run_id, "--print-cmd")
    assert f"+ scontrol requeue Incomplete {job_id}" in asked.stderr
    end = exit_of(run, 0)
    assert (end["next"], end["final"]) == ("await_slurm", False)
    assert "s left" in run.attempt(0).log_file(0).read_text()
    wait_for(lambda: here.status(run)["state"] == "pending")
    assert "requeue" in here.status(run)["reason"]
    here.command(["scancel", job_id])


@pytest.mark.evidence  # two minutes, and what it provokes comes by chance
@pytest.mark.timeout(400)
def test_a_lost_node_that_comes_back_ends_no_run(here: Site) -> None:
    """Its old step may live on while the next start begins; a launch that fails of it is tried again."""
    here.await_empty()
    job, enough = here.stepping("nodes = 3\nranks_per_node = 1", time="0:10:00")
    job_id, run = here.submit(job, "-w", "node[2-4]")
    wait_for(is_stepping(run, 0))
    devcluster.fail(here.cluster.layout, "node3")
    try:
        wait_for(lambda: here.status(run)["state"] == "pending", 150)
        # A requeued job is held for some seconds; after that it begins as soon as the node is back.
        held_until = here.command(
            ["squeue", "--noheader", f"--jobs={job_id}", "--Format=EligibleTime:30"]
        ).stdout.strip()
        wait_for(lambda: datetime.now() > datetime.fromisoformat(held_until))
    finally:
        devcluster.restore(here.cluster.layout, "node3")
    assert exit_of(run, 0)["cause"] == "node_lost"
    wait_for(lambda: (last := run.last_attempt()) and last.number and last.heartbeat.exists(), 180)
    enough.touch()
    assert here.wait(run).returncode == 0
    for number in run.attempt_numbers()[1:-1]:  # whether there were any is chance
        failed = exit_of(run, number)
        assert (failed["cause"], failed["next"]) == ("launch_failed", "restart")
        # "task 1 launch failed: ...", "Task launch for StepId=40.1 failed on node node3: Job credential revoked"
        assert re.search(r"launch (for \S+ )?failed", str(failed["evidence"]))
