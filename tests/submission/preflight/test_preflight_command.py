"""`preflight`, and what `submit`, `render` and `resume` say and refuse; small programs stand for Slurm's commands."""

from __future__ import annotations

import json

import pytest
from queued_runs import end_attempt, submitted

from toolkit.submission.preflight import cluster, storage
from toolkit.submission.preflight.storage import Mount

pytestmark = pytest.mark.usefixtures("dev_cluster_conf", "sbatch")

CONFIG = "ClusterName = devcluster\nGresTypes = gpu\nSelectType = select/cons_tres\nMaxArraySize = 101\nAccountingStorageEnforce = none\n"
PARTITION = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=01:00:00 MaxNodes=UNLIMITED "
    "MaxTime=10:00:00 MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=n[1-2] OverSubscribe=NO State=UP TotalCPUs=16 TotalNodes=2 "
    "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRESBillingWeights=CPU=2.0\n"
)
NODES = "n[1-2]@2@8@16000@gpu:4@(null)@idle@n[1-2]@\n"


@pytest.fixture
def slurm(fake_slurm, monkeypatch):
    """A cluster that answers, and runs that its nodes see; a call with a command's name makes that command fail."""
    fake_slurm.script(
        "scontrol", f"case \"$*\" in *config*) cat <<'END'\n{CONFIG}END\n;; *) cat <<'END'\n{PARTITION}END\nesac"
    )
    fake_slurm.respond_marked("sinfo", NODES)
    monkeypatch.setattr(storage, "mount_of", lambda path: Mount(path, "lustre", "fs"))
    monkeypatch.setattr(storage, "_PRIVATE", ())
    monkeypatch.setattr(cluster, "PATIENCE_S", 60.0)  # programs begin slowly on a busy machine

    def fail(command):
        fake_slurm.respond(command, stderr="Unable to contact slurm controller\n", code=1)

    return fail


def queries(fake_slurm) -> list[str]:
    """The calls that ask what the cluster has."""
    return [*fake_slurm.calls("scontrol"), *fake_slurm.calls("sinfo")]


def call(toolkit, command, *argv):
    return toolkit(command, toolkit.job("true"), "--site", "devcluster", *argv)


def test_all_that_is_wrong_is_told_at_once_and_nothing_is_made(toolkit, slurm, monkeypatch):
    said = call(toolkit, "submit", "-N", 3, "-t", "2-0", "-c", 999)
    assert said.code == 2
    assert said.err.splitlines() == [
        "toolkit: -t 2-0:job.time: walltime 2-00:00:00, but partition main allows at most 0-10:00:00. Fix: time = \"0-10:00:00\"",
        "toolkit: -N 3:job.nodes: 3 nodes, but partition main has 2. Fix: nodes = 2",
        "toolkit: -c 999:job.cpus_per_rank: 999 CPUs per node, but the largest node has 8. Fix: cpus_per_rank = 8; "
        "--force submits it anyway",
    ]  # fmt: skip
    assert not toolkit.runs.exists()


def test_a_partition_that_is_not_there_hides_nothing(toolkit, slurm):
    words = ("-p", "nope", "-t", "24:00", "-c", 999)
    said = call(toolkit, "submit", *words)
    assert said.code == 2 and not toolkit.runs.exists()
    assert [line.partition(". Fix")[0] for line in said.err.splitlines()] == [
        "toolkit: warning: -t 24:00:job.time: Slurm reads 24:00 as 24 minutes",
        "toolkit: -p nope:job.partition: this cluster has no partition 'nope'",
        "toolkit: -c 999:job.cpus_per_rank: 999 CPUs per node, but the largest node has 8",
    ]
    said = call(toolkit, "preflight", *words)
    assert (said.code, [line.split()[0] for line in said.out.splitlines()[:3]]) == (
        1,
        ["refusal", "refusal", "warning"],
    )
    slurm("scontrol")
    assert "partition 'nope' not found at site devcluster. Fix: write 'main'" in call(toolkit, "submit", *words).err


def test_ranks_that_follow_from_no_partition_are_not_counted(toolkit, slurm):
    job = toolkit.job("true", more="[parallel]\nshard = 4\n")
    said = toolkit("submit", job, "--site", "devcluster", "-p", "nope")
    assert (said.code, said.err.count("\n"), "partition 'nope' not found at site" in said.err) == (2, 1, True)


def test_the_cost_of_what_is_refused_later_is_not_told(toolkit, slurm):
    job = toolkit.job("true", more="[env]\nsecrets = { NOT_SET_HERE = 'env' }\n")
    said = toolkit("submit", job, "--site", "devcluster")
    assert (said.code, "NOT_SET_HERE is not set in this shell" in said.err, "asks for" in said.err) == (2, True, False)


def test_force_submits_and_says_what_it_passed_over(toolkit, slurm):
    said = call(toolkit, "submit", "-N", 3, "--force")
    assert said.code == 0 and "is job 8" in said.out
    assert (
        "toolkit: overridden (--force): -N 3:job.nodes: 3 nodes, but partition main has 2. Fix: nodes = 2" in said.err
    )
    # The limits of the site file can be out of date, too.
    assert call(toolkit, "submit", "-c", 9).code == 2
    assert call(toolkit, "submit", "-c", 9, "--force").code == 0


def test_force_is_offered_and_helps_where_there_is_a_cluster_alone(toolkit, slurm, fake_slurm):
    said = "it is down, can't be reached now, or it is an invalid entry for --cluster"
    for name in ("scontrol", "sinfo"):
        fake_slurm.respond(name, stderr=f"{name}: error: {said}\n", code=1)
    refused = call(toolkit, "submit", "-M", "foo")
    forced = call(toolkit, "submit", "-M", "foo", "--force")
    assert (refused.code, refused.err.count("\n"), "-M foo:job.cluster" in refused.err) == (2, 1, True), refused
    assert "--force" not in refused.err
    assert (forced.code, forced.err) == (2, refused.err)
    assert call(toolkit, "render", "-M", "foo").code == 0


def test_a_session_that_can_never_start_is_refused(toolkit, slurm, fake_slurm):
    fake_slurm.respond("salloc", stderr="salloc: error: it was asked\n", code=1)
    said = toolkit("session", "start", "--site", "devcluster", "-N", 3)
    what = "-N 3:job.nodes: 3 nodes, but partition main has 2. Fix: nodes = 2"
    assert (said.code, said.err) == (2, f"toolkit: {what}; --force requests them anyway\n")
    said = toolkit("session", "start", "--site", "devcluster", "-N", 3, "--force")
    assert said.code == 3 and f"toolkit: overridden (--force): {what}\n" in said.err and "it was asked" in said.err
    assert not toolkit.runs.exists()


def test_what_is_rendered_is_not_refused(toolkit, slurm):
    for command in (("render",), ("submit", "--dry-run")):
        said = call(toolkit, *command, "-N", 3)
        assert said.code == 0 and "#SBATCH --nodes=3" in said.out
        assert "toolkit: submit would refuse: -N 3:job.nodes: 3 nodes" in said.err


def test_what_it_costs_is_told_before(toolkit, slurm):
    said = call(toolkit, "submit", "-N", 2, "--ntasks-per-node", 4)
    told = "requests at most 2 node-hours, 8 CPU-hours, 16 billing hours (2 nodes x 0-01:00:00); if it has not finished by then, it is requeued and uses as much again"
    assert f"toolkit: {told}" in said.err.splitlines()  # the partition's DefaultTime and weights
    assert told in call(toolkit, "preflight", "-N", 2, "--ntasks-per-node", 4).out


def test_the_answer_of_preflight(toolkit, slurm):
    said = call(toolkit, "preflight", "-t", "24:00")
    assert said.code == 0 and not toolkit.runs.exists()
    assert said.out.startswith("warning  walltime      -t 24:00:job.time: Slurm reads 24:00 as 24 minutes.")
    assert "submit would accept this job" in said.out
    said = call(toolkit, "preflight", "-N", 3, "--json")
    told = json.loads(said.out)
    assert (said.code, told["good"], told["not_answered"]) == (1, False, [])
    assert told["findings"] == [
        {"check": "nodes", "severity": "refusal", "where": "-N 3:job.nodes", "what": "3 nodes, but partition main has 2", "fix": "nodes = 2"}
    ]  # fmt: skip
    assert told["cost"]["node_hours"] == 3.0


def test_a_cluster_that_does_not_answer_is_said_and_gone_past(toolkit, slurm):
    assert call(toolkit, "submit", "--gpus-per-node", 8).code == 2
    slurm("sinfo")
    said = call(toolkit, "submit", "--gpus-per-node", 8)
    assert said.code == 0
    assert "toolkit: could not check nodes: sinfo: Unable to contact slurm controller" in said.err
    said = call(toolkit, "submit", "-c", 9)  # what the site file knows is refused all the same
    assert said.code == 2 and "9 CPUs per node, but partition main of devcluster has 8" in said.err
    slurm("scontrol")
    said = call(toolkit, "submit", "-N", 3)
    assert said.code == 0
    assert "toolkit: could not check the cluster: scontrol: Unable to contact slurm controller" in said.err


def test_an_array_that_submit_splits_is_not_refused_by_sbatch(toolkit, slurm, fake_slurm):
    refusal = "sbatch: error: Batch job submission failed: Invalid job array specification"
    fake_slurm.script("sbatch", f'case "$*" in *--array*) echo "{refusal}" >&2; exit 1; esac')
    told = json.loads(call(toolkit, "preflight", "-a", "0-200", "--json").out)
    assert (told["good"], told["not_answered"], [one["check"] for one in told["findings"]]) == (True, [], ["array"])


def test_sbatch_decides_whether_an_account_may_use_a_reservation(toolkit, slurm, fake_slurm):
    """The account may be a child of an allowed one, so that the check itself only warns."""
    held = "ReservationName=held StartTime=2026-11-22T15:16:53 EndTime=2036-11-22T15:16:53 Nodes=n[1-2] NodeCnt=2 Flags= Users=(null) Groups=(null) Accounts=theirs State=ACTIVE"
    fake_slurm.script(
        "scontrol", f"case \"$*\" in *config*) cat <<'END'\n{CONFIG}END\n;; *reservation*) echo '{held}';; *) cat <<'END'\n{PARTITION}END\nesac"
    )  # fmt: skip
    refusal = "sbatch: error: Batch job submission failed: Access denied to requested reservation"
    fake_slurm.script("sbatch", f'case "$*" in *reservation*) echo "{refusal}" >&2; exit 1; esac')
    reserved = ("preflight", "-A", "spare", "--set", 'job.sbatch=["--reservation=held"]', "--json")
    found = {finding["check"]: finding for finding in json.loads(call(toolkit, *reserved).out)["findings"]}
    assert (found["reservation"]["severity"], found["options"]["severity"]) == ("warning", "refusal")
    assert "Access denied" in found["options"]["what"]


def test_few_questions_are_asked(toolkit, fake_slurm, slurm):
    call(toolkit, "preflight")
    assert len(queries(fake_slurm)) == 3


def test_a_resume_is_looked_at_too_and_leaves_the_run_as_it_was(toolkit, slurm):
    run = submitted(toolkit, "7", "work")
    end_attempt(run, state="stopped")
    before = sorted(path.name for path in run.path.iterdir())
    said = toolkit("resume", run.run_id, "-N", 3)
    assert said.code == 2 and "3 nodes, but partition main has 2" in said.err, said
    assert sorted(path.name for path in run.path.iterdir()) == before
    assert toolkit("resume", run.run_id, "-N", 3, "--force").code == 0


def test_a_local_site_is_asked_nothing(toolkit, fake_slurm, slurm):
    said = toolkit("preflight", toolkit.job("true"), "--site", "local", "--json")
    assert (said.code, json.loads(said.out)["cost"], queries(fake_slurm)) == (0, None, [])
