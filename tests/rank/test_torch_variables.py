"""The place of a rank that becomes a program, from the variables of its launcher."""

import pytest

from toolkit.rank.torch_variables import _variables, _world_of_launcher
from toolkit.world.rendezvous import Endpoint


def world(rank, size, per_node, **more):
    environ = {
        "TOOLKIT_WORLD_SIZE": str(size), "TOOLKIT_RANKS_PER_NODE": per_node, "TOOLKIT_LAUNCHER": "mpirun",
        "TOOLKIT_ATTEMPT": "0", "TOOLKIT_RUN_DIR": "/runs/job/20261124-1", **more,
    }  # fmt: skip
    return _world_of_launcher(environ, rank)


@pytest.mark.parametrize(
    ("rank", "size", "per_node", "place"),
    [
        (0, 4, "4", (0, 0, 4, 1)),
        (5, 8, "4", (1, 1, 4, 2)),
        (4, 5, "3", (1, 1, 2, 2)),  # the last node is not full
    ],
)
def test_ranks_are_numbered_node_by_node(rank, size, per_node, place):
    one = world(rank, size, per_node)
    assert (one.node, one.local_rank, one.local_size, one.nodes) == place


def test_under_srun_ranks_are_where_slurm_has_put_them():
    """Four ranks of up to three on two nodes are two on each."""
    step = {
        "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }  # fmt: skip
    one = world(2, 4, "3", TOOLKIT_LAUNCHER="srun", **step)
    assert (one.node, one.local_rank, one.local_size, one.nodes) == (1, 0, 2, 2)


def test_the_launcher_knows_the_rank_on_the_node_best():
    assert world(1, 4, "4", MPI_LOCALRANKID="3").local_rank == 3


@pytest.mark.parametrize(("launcher", "has_id"), [("mpirun", True), ("local", True), ("srun", False)])
def test_lightning_selects_slurm_only_in_a_step(launcher, has_id):
    """It saves on SIGUSR1 only under Slurm, and waits forever outside of Slurm without this id."""
    variables = _variables(world(1, 4, "4", TOOLKIT_LAUNCHER=launcher), Endpoint("10.0.0.1", 5000), has_store=True)
    assert ("TORCHELASTIC_RUN_ID" in variables) is has_id
    assert variables["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:5001"
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
