"""Runs on another cluster of the same accounting: small programs stand for Slurm's commands, and write down their calls."""

from __future__ import annotations

import json

import pytest
from queued_runs import claim, end_attempt

from toolkit.errors import ToolkitError
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.efficiency import count
from toolkit.runs.record.job import recorded_job
from toolkit.submission.allocation import check_here, cluster_here

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")

UNKNOWN = """echo "'$1' can't be reached now, or it is an invalid entry for --cluster." >&2; exit 1"""


@pytest.fixture
def slurm(fake_slurm):
    """Two clusters: on cluster far job 7 is held, on the site's own cluster it runs."""
    fake_slurm.queue_by_cluster(far=("7", "PENDING", "JobHeldUser"), near=("7", "RUNNING", "None"))
    fake_slurm.respond("sacctmgr", "near\n")
    fake_slurm.script("scontrol", UNKNOWN)
    fake_slurm.respond("sbatch", "8;far\n")
    for command in ("scancel", "srun", "sacct"):
        fake_slurm.respond(command)
    return fake_slurm


def run_on(toolkit, cluster: str, name: str) -> RunDirectory:
    """A run as `submit` leaves it behind."""
    job = toolkit.job("true", name=name)
    toolkit.ok("render", job, "--site", "devcluster", *(("-M", cluster) if cluster else ()))
    (path,) = toolkit.runs.glob(f"{name}/*")
    write_json(path / "submitted-000.json", {"job_id": "7", "start": 0, "time": "2026-11-21T02:48:01.000Z"})
    return RunDirectory(path)


def test_the_script_says_where_it_goes(toolkit) -> None:
    script = toolkit.ok("render", toolkit.job("true"), "--site", "devcluster", "-M", "far", "-p", "any")
    assert "#SBATCH --clusters=far\n" in script and "#SBATCH --partition=any\n" in script
    assert "--clusters" not in toolkit.ok("render", toolkit.job("true"), "--site", "devcluster")


def test_each_run_is_asked_for_on_its_own_cluster(toolkit, slurm) -> None:
    away, home = run_on(toolkit, "far", "away"), run_on(toolkit, "", "home")
    told = {one["job_name"]: one for one in json.loads(toolkit.ok("history", "--json"))}
    assert (told["away"]["state"], told["away"]["cluster"], told["away"]["job_id"]) == ("pending", "far", "7")
    assert "held until `scontrol -M far release 7`" in told["away"]["reason"]
    assert (told["home"]["state"], told["home"]["cluster"]) == ("running", "")
    assert len(slurm.calls("squeue")) == 2, "one question to each cluster"
    assert "7;far " in toolkit.ok("status", away.run_id)
    assert "`scontrol -M far release 7`" in toolkit.ok("explain", away.run_id)
    assert toolkit.ok("status", "7;far", "--json") == toolkit.ok("status", away.run_id, "--json")
    assert json.loads(toolkit.ok("status", "7;devcluster", "--json"))["run_id"] == home.run_id
    toolkit.ok("cancel", "7;far")
    assert "scancel --clusters=far --full 7" in slurm.calls()
    toolkit.ok("cancel", home.run_id)
    assert "scancel --full 7" in slurm.calls()


def test_no_cluster_waits_for_anothers_job(toolkit, slurm) -> None:
    parent = run_on(toolkit, "far", "parent")
    child = ("render", toolkit.job("true"), "--site", "devcluster", "--after", parent.run_id)
    said = toolkit(*child)
    assert said.code == 2 and "(job 7;far, site devcluster) is not a Slurm job of site devcluster" in said.err
    said = toolkit(*child, "-M", "near")
    assert "is not a Slurm job of cluster near" in said.err
    assert "afterok:7" in toolkit.ok(*child, "-M", "far")


def test_a_cluster_that_is_not_there_is_refused_before_the_submission(toolkit, slurm) -> None:
    said = toolkit("submit", toolkit.job("true"), "--site", "devcluster", "-M", "fra")
    assert said.code == 2
    assert (
        "-M fra:job.cluster: cluster 'fra' not found in the accounting database. Fix: choose one with -M: near"
        in said.err
    )
    assert not list(toolkit.runs.glob("*/*")) and not slurm.calls("sbatch")


def test_a_resume_goes_where_the_run_was_or_elsewhere(toolkit, slurm) -> None:
    slurm.respond("scontrol")  # both clusters are up
    run = run_on(toolkit, "far", "moved")
    claim(run)
    end_attempt(run, state="failed", cause="crashed", exit_code=1)
    write_json(run.start(0) / "end.json", {"state": "failed", "exit_code": 1, "time": "2026-11-21T02:48:01.000Z"})
    assert not count._has_moved(run, recorded_job(run))
    said = toolkit.ok("resume", run.run_id, "-M", "near", "--force")
    assert f"run {run.run_id} is job 8;near, in {run.path}" in said
    assert any(call.startswith("sbatch --clusters=near --parsable") for call in slurm.calls())
    assert recorded_job(run).job.cluster == "near"
    # sacct of one cluster knows nothing of the other's lives, and may know another job of that number.
    assert count._has_moved(run, recorded_job(run))


def test_a_run_in_an_allocation_is_on_its_cluster() -> None:
    salloc = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "far", "SLURM_WORKING_CLUSTER": "far:10.0.0.2:6817:9728:109"}
    assert cluster_here(salloc, None) == cluster_here(salloc, "far") == "far"
    home = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "near"}
    assert cluster_here(home, None) == cluster_here(home, "near") == ""
    with pytest.raises(ToolkitError, match=r"-M far: allocation 7 is on cluster near.*omit -M"):
        cluster_here(home, "far")


def test_an_allocation_of_several_components_is_refused(toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    job = recorded_job(run_on(toolkit, "", "home"))
    with pytest.raises(
        ToolkitError,
        match=r"allocation 7 has 2 components, but a foreground run uses only one.*`toolkit submit` a job with a",
    ):
        check_here(job, {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"})
