"""What a cluster says of itself, in the words of several versions of Slurm."""

import grp
import os

import pytest

from toolkit.slurm.cluster import closed_by, mpi_plugins_in
from toolkit.slurm.limits import limits_of
from toolkit.slurm.records import show_fields
from toolkit.slurm.sbatch_options import gpus_of


@pytest.mark.parametrize(
    ("gres", "counts"),
    [
        ("gpu:a100:4(S:0-1),nvme:3800", {"a100": 4}),
        ("gpu:4", {"": 4}),
        ("gpu:a100:2,gpu:a100_1g.5gb:7(S:0)", {"a100": 2, "a100_1g.5gb": 7}),
        ("gpu:h100:4(IDX:0-3)", {"h100": 4}),
        ("(null)", {}),
        ("craynetwork:4,shard:8", {}),
    ],
)
def test_gpus_of_a_node_are_counted(gres, counts):
    assert gpus_of(gres) == counts


@pytest.mark.parametrize(
    "told",
    [
        "MPI plugin types are...\n\tnone\n\tpmix\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n",
        "srun: MPI types are...\nsrun: none\nsrun: pmix\nsrun: pmi2\n",
    ],
)
def test_the_mpi_plugins_of_old_and_new_versions(told):
    assert mpi_plugins_in(told) == ("none", "pmix", "pmi2")


def test_a_partition_of_the_users_own_group_is_open():
    own = grp.getgrgid(os.getegid()).gr_name
    for groups, closed in (("ALL", ""), ("nobody-else", "AllowGroups=nobody-else"), (f"nobody-else,{own}", "")):
        (block,) = show_fields(f"PartitionName=p AllowGroups={groups} MaxNodes=4 State=UP\n", "PartitionName")[0]
        assert closed_by(limits_of(block)) == closed
