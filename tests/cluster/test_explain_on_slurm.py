"""Each cause is provoked on a real Slurm, and explained right: symptom, numbers, evidence, and a fix that works as printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clusters import RELEASE, shared_folder
from on_slurm import Site, is_stepping, make_site, wait_for
from session_cluster import RunningCluster

from toolkit.devcluster import cluster as devcluster
from toolkit.rundir.claims import read_claim
from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

# Rank 1 comes to no all-reduce after the third.
LATE = """
import datetime, sys, time
import torch, torch.distributed as dist

def main(world, config):
    group = dist.new_group(timeout=datetime.timedelta(seconds=3), backend="gloo")
    for step in range(100):
        if world.should_stop(step):
            return
        if step == 3 and world.rank == 1:
            print("\\033[31mreading a slow disk\\033[0m", flush=True)
            time.sleep(100)
        dist.all_reduce(torch.ones(1), group=group)
"""


def explain(here: Site, run: RunDirectory) -> dict[str, Any]:
    for _ in range(5):  # Slurm may change its reason between the two: PartitionConfig becomes PartitionNodeLimit
        told: dict[str, Any] = json.loads(here.ok("explain", run.run_id, "--json"))
        text = here.ok("explain", run.run_id)
        if told["why"] in text:
            break
    assert 3 <= len(text.splitlines()) <= 12, text
    assert "\x1b" not in text
    assert told["why"] in text
    return told


def evidence(told: dict[str, Any]) -> str:
    return "\n".join(f"{one['source']}: {one['line']}" for one in told["evidence"])


def do(here: Site, told: dict[str, Any]) -> None:
    """The first action's command, typed as it is printed."""
    command = re.search(r"`([^`]+)`", told["actions"][0])
    assert command, told
    done = here.command(shlex.split(command[1]))
    assert done.returncode == 0, (command[1], done)


def held_back(here: Site, *sbatch: str) -> RunDirectory:
    """`true`, with options that keep it in the queue."""
    return here.submit(here.job("true"), "--set", "job.sbatch=" + json.dumps(sbatch))[1]


def reason_of(told: dict[str, Any]) -> tuple[str, str]:
    return told["waiting"]["reason"], told["waiting"]["can_start"]


def test_why_runs_wait_and_that_the_fix_mends_it(here: Site) -> None:
    here.command(["scontrol", "update", "nodename=node4", "state=drain", "reason=bad fan"])
    failed = here.command(["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "exit 1"]).stdout.strip()
    trusting = here.folder / "trusting.toml"  # a site file that knows nothing of the partition's limit
    trusting.write_text(
        here.file.read_text().replace('"here"', '"trusting"') + '[partitions.short]\nmax_time = "UNLIMITED"\n'
    )
    long = here.submit(here.job("true"), "-p", "short", "-t", "10", "--force", TOOLKIT_SITE=str(trusting))[1]
    held = held_back(here, "--hold")
    later = held_back(here, "--begin=now+600")
    drained = held_back(here, "--nodelist=node4")
    wait_for(lambda: "FAILED" in here.command(["squeue", "-h", "--states=all", "-j", failed, "-o", "%T"]).stdout)
    orphan = held_back(here, f"--dependency=afterok:{failed}")
    array = here.submit(here.job("sleep 600"), "--set", "job.array=0-2%1")[1]
    wait_for(lambda: array.task_numbers())
    try:
        told = {run: explain(here, run) for run in (long, held, later, drained, orphan, array)}
        assert reason_of(told[long]) == ("PartitionTimeLimit", "never")
        assert "requests 10:00, but short allows 2:00" in told[long]["why"]
        assert reason_of(told[held]) == ("JobHeldUser", "never")
        assert reason_of(told[later]) == ("BeginTime", "not_before")
        assert told[later]["waiting"]["not_before"].endswith("Z")
        assert reason_of(told[drained]) == ("ReqNodeNotAvail", "not_before")
        assert "node4 is drained" in told[drained]["why"] and "bad fan (root" in evidence(told[drained])
        assert reason_of(told[orphan]) == ("DependencyNeverSatisfied", "never")
        assert f"afterok:{failed} cannot be satisfied" in told[orphan]["why"]
        assert reason_of(told[array]) == ("JobArrayTaskLimit", "not_before")
        assert "1 running" in told[array]["why"]
        for run in (long, held, orphan):
            do(here, told[run])
            assert here.wait(run).returncode == 0
    finally:
        here.command(["scontrol", "update", "nodename=node4", "state=resume"])
        here.command(["scancel", "--user=root"])


def test_more_nodes_than_the_partition_has(here: Site) -> None:
    submit = ("submit", here.job("true"), "-N", "9", "--force")
    if RELEASE == "24.11":
        refused = here.toolkit(*submit)
        assert refused.returncode == 3 and "Requested node configuration is not available" in refused.stderr
        return
    job_id, run = here.submit(*submit[1:])
    wait_for(lambda: "PartitionNodeLimit" in here.command(["squeue", "-h", "-j", job_id, "-o", "%r"]).stdout)
    told = explain(here, run)
    assert reason_of(told) == ("PartitionNodeLimit", "never") and "nodes requested: 9; main has 4" in told["why"]


@pytest.fixture(scope="module")
def ended(cluster: RunningCluster) -> Iterator[SimpleNamespace]:
    """A site with one failed run per symptom. All are submitted before the first is awaited, since each takes seconds."""
    with shared_folder("explain-") as folder:
        site = make_site(cluster, folder)
        runs = {name: submit(site) for name, submit in FAILURES.items()}
        for run in runs.values():
            site.wait(run)
        yield SimpleNamespace(site=site, **runs)


def submit_late_rank(site: Site) -> RunDirectory:
    """Rank 1 misses an all-reduce. Of two waiting ranks, one can crash in gloo when the other times out."""
    (site.folder / "late.py").write_text(LATE)
    (site.folder / "late.toml").write_text(
        '[job]\nentry = "late.py:main"\nnodes = 2\nranks_per_node = 1\ntime = "5"\n[restart]\ncrashes = 0\n'
    )
    return site.submit("late.toml")[1]


def submit_without_interpreter(site: Site) -> RunDirectory:
    """The Python that submitted, whose path is in the script, is removed before the job starts."""
    (site.folder / "venv").symlink_to(Path(sys.prefix))
    entry = [str(site.folder / "venv/bin/python"), "-c", "from toolkit.cli.main import main; main()"]
    submit = [*entry, "submit", str(site.job("true")), "--parsable", "--set", 'job.sbatch=["--hold"]']
    job_id, _, run_id = site.command(submit).stdout.strip().partition(";")
    (site.folder / "venv").unlink()
    site.command(["scontrol", "release", job_id])
    return site.run(run_id)


def submit_without_log_folder(site: Site) -> RunDirectory:
    """The run directory is not there when Slurm opens the log."""
    job_id, run = site.submit(site.job("true"), "--set", 'job.sbatch=["--hold"]')
    away = run.path.rename(site.folder / "away")
    site.command(["scontrol", "release", job_id])
    wait_for_failed(site, job_id)
    shutil.rmtree(run.path, ignore_errors=True)  # made for the log by Slurm since 23.02, on the node's own disk
    away.rename(run.path)
    return run


WRONG_PMI = '[launcher]\nmpi = "pmi2"\nlibmpi = "/usr/lib/x86_64-linux-gnu/libmpi.so.40"\n'


def submit_with_wrong_pmi(site: Site) -> RunDirectory:
    """srun speaks another PMI than the MPI that mpi4py loads."""
    other = site.folder / "other.toml"
    other.write_text(site.file.read_text().replace('"here"', '"other"') + WRONG_PMI)
    return site.submit("mpi_hello", "--ntasks-per-node", 2, TOOLKIT_SITE=str(other))[1]


def submit_with_failing_setup(site: Site) -> RunDirectory:
    """A line of the site file fails before the supervisor starts, and Slurm's log is outside of the run directory."""
    broken = site.folder / "broken.toml"
    broken.write_text(site.file.read_text().replace('"here"', '"broken"') + '[env]\nsetup = ["false"]\n')
    log = site.folder / "logs of mine" / "%j.log"
    log.parent.mkdir()
    job_id, run = site.submit(site.job("true"), "-o", log, TOOLKIT_SITE=str(broken))
    wait_for_failed(site, job_id)
    return run


def submit_and_scancel(site: Site) -> RunDirectory:
    job_id, run = site.submit(site.job("true"), "--set", 'job.sbatch=["--hold"]')
    site.command(["scancel", job_id])
    return run


def wait_for_failed(site: Site, job_id: str) -> None:
    wait_for(lambda: "FAILED" in site.command(["scontrol", "show", "job", job_id]).stdout)


FAILURES = {
    "late_rank": submit_late_rank,
    "no_interpreter": submit_without_interpreter,
    "no_log_folder": submit_without_log_folder,
    "wrong_pmi": submit_with_wrong_pmi,
    "failing_setup": submit_with_failing_setup,
    "scancelled": submit_and_scancel,
}


def test_a_failing_setup_line_is_quoted_from_the_log_that_the_job_chose(ended: SimpleNamespace) -> None:
    explanation = explain(ended.site, ended.failing_setup)
    job_id = explanation["status"]["job_id"]
    assert explanation["symptom"] == "setup_failed"
    assert f"{job_id}.log: toolkit: this line of the site" in evidence(explanation)


def test_a_missing_run_directory_is_named(ended: SimpleNamespace) -> None:
    explanation = explain(ended.site, ended.no_log_folder)
    assert explanation["symptom"] == "no_log_folder" and str(ended.no_log_folder.path) in evidence(explanation)


def test_a_job_cancelled_without_toolkit_is_recognized(ended: SimpleNamespace) -> None:
    """With accounting the explanation also names who cancelled it."""
    explanation = explain(ended.site, ended.scancelled)
    assert explanation["symptom"] == "cancelled_by_other"
    assert re.search(r"not (with )?`toolkit cancel`", explanation["why"])


def test_a_missing_interpreter_is_quoted_from_slurms_log(ended: SimpleNamespace) -> None:
    explanation = explain(ended.site, ended.no_interpreter)
    assert explanation["symptom"] == "no_interpreter"
    assert f"slurm-{explanation['status']['job_id']}.out" in evidence(explanation)
    assert "venv/bin/python: No such file" in evidence(explanation)


def test_a_wrong_pmi_is_explained_with_the_option_that_fits(ended: SimpleNamespace) -> None:
    explanation = explain(ended.site, ended.wrong_pmi)
    assert explanation["symptom"] == "wrong_pmi" and "--mpi=pmix" in explanation["actions"][0]


def test_a_late_rank_is_named_with_its_last_line(ended: SimpleNamespace) -> None:
    explanation = explain(ended.site, ended.late_rank)
    assert (explanation["symptom"], explanation["rank"]) == ("collective_timeout", 1), explanation
    assert "rank 1 did not join" in explanation["why"]
    assert "rank 0 waited at late.py:13" in explanation["why"]
    assert "rank-1.log: reading a slow disk" in evidence(explanation)


def test_who_cancelled_it_is_known_where_accounts_are_kept(accounting_cluster: Any, shared_path: Path) -> None:
    here = make_site(accounting_cluster, shared_path)
    job_id, run = here.submit(here.job("true"), "--set", 'job.sbatch=["--hold"]')
    here.command(["scancel", job_id])
    wait_for(lambda: "CANCELLED" in here.command(["sacct", "-nX", "-j", job_id, "-o", "State"]).stdout)
    told = explain(here, run)
    assert (told["symptom"], "you cancelled it with scancel" in told["why"]) == ("cancelled_by_other", True)
    assert "sacct" in evidence(told)
    job_id, run = here.submit(here.job("true"), "--set", 'job.sbatch=["--hold"]')
    here.ok("cancel", run.run_id)
    assert here.wait(run).returncode == 143
    assert explain(here, run)["symptom"] == "cancelled"


def stepping(here: Site, name: str, time: str, keys: str = "", restart: str = "") -> RunDirectory:
    job, _ = here.stepping(keys, name=name, time=time, tables=f"[restart]\nwarn_s = 10\n{restart}\n")
    return here.submit(job)[1]


@pytest.mark.evidence
@pytest.mark.timeout(400)
def test_ends_that_take_their_time(here: Site) -> None:
    """Walltime, preemption, a lost node, a killed supervisor."""
    wall = stepping(here, "wall", "1", restart="walltimes = 0")
    node = stepping(here, "node", "5", 'requeue = false\nnodes = 2\nnodelist = "node[3-4]"')
    killed = stepping(here, "killed", "5", 'nodelist = "node2"')
    for run in (wall, node, killed):
        wait_for(is_stepping(run, 0))
    claim = json.loads((killed.start(0) / "claim.json").read_text())
    here.cluster.exec("node2", ["kill", "-9", str(claim["pid"])])
    devcluster.fail(here.cluster.layout, "node4")
    try:
        assert here.wait(killed).returncode == 125
        assert explain(here, killed)["symptom"] in ("supervisor_lost", "supervisor_failed")
        assert here.toolkit("wait", node.run_id, timeout_s=150).returncode
        told = explain(here, node)
        assert told["symptom"] == "node_lost" and "node4" in told["why"]
        assert here.toolkit("wait", wall.run_id, timeout_s=150).returncode == 140
        told = explain(here, wall)
        assert told["symptom"] == "walltime" and "restart.walltimes = 0 is spent" in told["follows"]
    finally:
        devcluster.restore(here.cluster.layout, "node4")
    preempted = stepping(here, "pre", "5", 'requeue = false\nnodes = 3\ncpus_per_rank = 8\npartition = "low"')
    wait_for(is_stepping(preempted, 0))
    here.command(["sbatch", "-p", "high", "-N4", "-c8", "-o", "/dev/null", "--wrap", "sleep 1"])
    assert here.toolkit("wait", preempted.run_id, timeout_s=120).returncode == 143
    assert explain(here, preempted)["symptom"] == "preempted"


@pytest.mark.evidence
@pytest.mark.timeout(300)
@pytest.mark.timeout(180)
def test_a_lost_supervisor_is_not_explained_by_the_life_before_the_requeue(here: Site) -> None:
    run = stepping(here, "lives", "0:05:00")
    job_id = here.status(run)["job_id"]
    log = run.path / f"slurm-{job_id}.out"
    with log.open("a") as stream:  # as Slurm writes it where a node fails
        stream.write(f"slurmstepd: error: *** JOB {job_id} ON node1 CANCELLED AT now DUE TO NODE FAILURE ***\n")
    assert here.command(["scontrol", "requeue", job_id]).returncode == 0
    wait_for(is_stepping(run, 1))
    claim = read_claim(run, 1)
    assert claim is not None
    here.cluster.exec(claim.host, ["kill", "-KILL", str(claim.pid)])
    wait_for(lambda: here.status(run)["state"] in ("lost", "failed"))
    told = explain(here, run)
    assert told["symptom"] in ("supervisor_lost", "supervisor_failed"), told
    assert "NODE FAILURE" not in evidence(told)
    begun = [line for line in log.read_text().splitlines() if "begins (restart" in line]
    assert [line[line.index("job") :] for line in begun] == [f"job {job_id} begins (restart {n})" for n in (0, 1)]
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_of_a_node(here: Site) -> None:
    """The checkpoints lie in a tmpfs of node1 that holds one of them and not two."""
    here.cluster.exec(
        "node1", ["sh", "-c", "mkdir -p /tmp/full && mount -t tmpfs -o size=600k none /tmp/full && mkdir /tmp/full/c"]
    )
    sets = [
        "train.steps=20",
        "checkpoint.every_steps=5",
        "args.layers=1",
        "args.width=32",
        "restart.crashes=0",
        'job.sbatch=["--hold"]',
    ]
    job_id, run = here.submit(
        "train_lm", "-w", "node1", "--ntasks-per-node", 2, *(word for one in sets for word in ("--set", one))
    )
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to("/tmp/full/c")
    here.command(["scontrol", "release", job_id])
    try:
        here.toolkit("wait", run.run_id, timeout_s=120)
        told = explain(here, run)
        assert told["symptom"] == "disk_full" and "No space left on device" in told["why"]
        assert "free space" in told["actions"][0]
    finally:
        here.cluster.exec("node1", ["umount", "/tmp/full"])


def test_out_of_memory(here: Site) -> None:
    """Without cgroups, slurmstepd kills a step within 5 s after it has exceeded its memory."""
    hog = textwrap.dedent(
        """
        import time
        held = b"x" * 700_000_000
        time.sleep(60)
        """
    )
    (here.folder / "hog.py").write_text(hog)
    (here.folder / "hog.toml").write_text(
        '[job]\nentry = "hog.py"\nranks_per_node = 2\nmem_gb_per_node = 1\ntime = "5"\n[restart]\ncrashes = 0\n'
    )
    run = here.submit("hog.toml")[1]
    here.toolkit("wait", run.run_id, timeout_s=120)
    told = explain(here, run)
    assert told["symptom"] == "out_of_memory" and "exceeded" in evidence(told).lower()
    assert "mem_gb_per_node" in told["actions"][0]
