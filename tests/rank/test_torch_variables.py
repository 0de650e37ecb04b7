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


def test_components_have_their_own_number_of_ranks_on_each_node():
    nodes = {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2"}
    one = world(4, 9, "1,4", **nodes)
    assert (one.node, one.local_rank, one.local_size, one.nodes) == (1, 3, 4, 3)


def test_the_launcher_knows_the_rank_on_the_node_best():
    assert world(1, 4, "4", MPI_LOCALRANKID="3").local_rank == 3


@pytest.mark.parametrize(("launcher", "has_id"), [("mpirun", True), ("local", True), ("srun", False)])
def test_lightning_selects_slurm_only_in_a_step(launcher, has_id):
    """It saves on SIGUSR1 only under Slurm, and waits forever outside of Slurm without this id."""
    variables = _variables(world(1, 4, "4", TOOLKIT_LAUNCHER=launcher), Endpoint("10.0.0.1", 5000), has_store=True)
    assert ("TORCHELASTIC_RUN_ID" in variables) is has_id
    assert variables["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:5001"
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
