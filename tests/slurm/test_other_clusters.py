"""Another cluster of the same accounting: what each command is told, and what is said of one that is not there."""

from __future__ import annotations

from functools import partial

import pytest

from toolkit.slurm.commands import Slurm, UnknownClusterError
from toolkit.slurm.limits import reservations
from toolkit.slurm.records import cluster_of_allocation, for_cluster, with_cluster_option

# As 22.05 says it of any command.
NO_ADDRESS = (
    "squeue: error: No cluster 'far' known by database.\n"
    "squeue: error: 'far' can't be reached now, or it is an invalid entry for --cluster.  "
    "Use 'sacctmgr list clusters' to see available clusters."
)
NO_DATABASE = (
    "squeue: error: There is a problem talking to the database: Connection refused.  Only local cluster communication "
    "is available, remove --cluster from your command line or contact your admin to resolve the problem."
)


@pytest.fixture
def command(fake_slurm):
    """Make a command of Slurm run lines of bash."""
    return partial(fake_slurm.script, shell="/bin/bash")


def test_each_command_that_can_be_is_told_the_cluster(command) -> None:
    command("scancel", 'echo "$@" >&2; exit 1')
    with pytest.raises(Exception, match="--clusters=far --full 7"):
        Slurm(cluster="far").cancel(["7"])
    assert for_cluster(["squeue", "--me"], "far") == ["squeue", "--clusters=far", "--me"]
    assert for_cluster(["squeue", "--me"], "") == ["squeue", "--me"]
    assert for_cluster(["sacctmgr", "show", "qos"], "far") == ["sacctmgr", "show", "qos"]


def test_the_commands_in_a_text_are_for_the_cluster() -> None:
    said = "`toolkit logs last` says why; then `scontrol release 7`"
    assert with_cluster_option(said, "far") == "`toolkit logs last` says why; then `scontrol -M far release 7`"
    assert with_cluster_option(said, "") == said


@pytest.mark.parametrize(
    ("said", "sacctmgr", "message", "fix"),
    [
        (NO_ADDRESS, "echo near; echo next", "cluster 'far' not found in the accounting database", "with -M: near, next"),
        (NO_ADDRESS, "echo near; echo far", "cluster 'far' is down", "wait until it is up"),
        (NO_DATABASE, "exit 1", "cluster 'far' not found: There is a problem talking", "omit -M and the key cluster"),
    ],
)  # fmt: skip
def test_a_cluster_without_an_address_is_told_apart(command, said: str, sacctmgr: str, message: str, fix: str) -> None:
    command("squeue", f'cat >&2 <<"END"\n{said}\nEND\nexit 1')
    command("sacctmgr", sacctmgr)
    with pytest.raises(UnknownClusterError, match=message) as error:
        Slurm(cluster="far").call(["squeue"])
    assert fix in error.value.fix and error.value.exit_code == 3


def test_the_fix_of_a_refusal_is_for_the_cluster(command) -> None:
    command("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    with pytest.raises(Exception, match="`sinfo -M far -s` lists the partitions"):
        Slurm(cluster="far").call(["sbatch"])


def test_facts_say_which_cluster_was_asked(command) -> None:
    command("squeue", "echo 'squeue: error: Invalid job id specified' >&2; exit 1")
    command(
        "sacct",
        'for one in "$@"; do case $one in --delimiter=*) d=${one#*=};; esac; done; echo "7${d}FAILED${d}1:0${d}n1${d}t${d}7${d}"',
    )
    assert Slurm(cluster="far").jobs(["7"])["7"].cluster == "far"


def test_the_cluster_of_an_allocation_is_needed_outside_of_its_nodes_alone() -> None:
    salloc = {"SLURM_JOB_ID": "7", "SLURM_WORKING_CLUSTER": "far:10.0.0.2:6817:9728:109"}
    assert cluster_of_allocation(salloc) == "far"
    assert cluster_of_allocation({**salloc, "SLURMD_NODENAME": "n1"}) == ""
    assert cluster_of_allocation({"SLURM_JOB_ID": "7", "SLURM_CLUSTERS": "far"}) == "far"
    assert cluster_of_allocation({"SLURM_JOB_ID": "7"}) == ""
    assert cluster_of_allocation({"SLURM_CLUSTERS": "far"}) == ""


def test_an_unknown_cluster_is_not_a_missing_reservation(command) -> None:
    command("scontrol", f'cat >&2 <<"END"\n{NO_DATABASE}\nEND\nexit 1')
    command("sacctmgr", "exit 1")
    with pytest.raises(UnknownClusterError):
        reservations(Slurm(cluster="far"), "maintenance")
