"""What the launcher gave to each rank of a node, by its own word or by MPI."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from toolkit.supervise.launchers import find_mpirun
from toolkit.world.discover import discover
from toolkit.world.masks import from_slurm, masks_of_node

MPIRUN = find_mpirun("", {})
OWN = frozenset({4, 5, 6, 7})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (OWN, OWN)),
        ({"SLURM_CPU_BIND_TYPE": "none", "SLURM_CPU_BIND_LIST": ""}, (OWN, OWN)),
        ({"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x0000000F,0x000000F0"}, ({0, 1, 2, 3}, OWN)),
        ({"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0xF0"}, (OWN, OWN)),
        (
            {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0xF0,0x0F"},
            (None, OWN),
        ),  # that of a parent step
        ({"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0xF0,what"}, (None, OWN)),
        ({"SLURM_CPU_BIND_TYPE": "rank:", "SLURM_CPU_BIND_LIST": ""}, (None, OWN)),
    ],
)
def test_srun_says_how_it_bound_its_tasks(environ, expected):
    assert from_slurm(OWN, 1, 2, environ) == expected


def test_ranks_of_one_parent_have_the_same():
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TOOLKIT_LAUNCHER": "local"}
    own = frozenset(os.sched_getaffinity(0))
    assert masks_of_node(discover(ranks), ranks) == (own, own)
    assert masks_of_node(discover({}), {}) == (own,)


BINDS_ITSELF = """
import os
from toolkit.world.discover import discover
from toolkit.world.masks import masks_of_node
world = discover()
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpus[world.rank % len(cpus)]})
print(world.rank, [sorted(mask) for mask in masks_of_node(world, os.environ)] ==
      [[cpus[rank % len(cpus)]] for rank in range(3)], flush=True)
"""


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside this Python")
def test_over_mpi_each_tells_its_own():
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    done = subprocess.run(
        [MPIRUN, "-n", "3", sys.executable, "-c", BINDS_ITSELF], env=kept, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["0 True", "1 True", "2 True"], done.stderr
