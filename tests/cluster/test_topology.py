"""On real nodes: places and switches come from Slurm, and the hierarchical reduction spares slow links."""

import json
import sys
from pathlib import Path

import pytest
from on_slurm import await_idle_nodes

from toolkit.devcluster import cluster as devcluster

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def test_a_node_knows_its_switches_from_slurm(cluster):
    code = "from toolkit.cli.main import main; main()"
    show = [sys.executable, "-c", code, "topo", "show", "--json"]
    (facts,) = json.loads(cluster.run("srun", "--nodelist=node3", "--mpi=none", *show))["nodes"]
    assert facts["host"]["value"] == "node3"
    assert facts["switches"]["value"]["levels"] == ["spine", "leaf2"]


@pytest.mark.evidence
def test_hierarchical_reduction_is_faster_on_slow_links_with_ranks_dealt_in_turn(cluster):
    await_idle_nodes(cluster)
    devcluster.shape(cluster.layout, "all", "100mbit")
    try:
        output = cluster.run(
            *["srun", "--nodes=4", "--ntasks-per-node=2", "--distribution=cyclic", "--mpi=none"],
            *["--export=ALL,OMP_NUM_THREADS=1", sys.executable, str(ROOT / "benchmarks" / "hierarchical_reduction.py")],
            *["--mb=2", "--rounds=3"],
            timeout_s=100,
        )
    finally:
        devcluster.shape(cluster.layout, "all", "none")
    result = json.loads(output[output.index("{") :])
    assert result["layout"] == "4 nodes with 2 ranks each"
    assert result["ratio"] < 0.85, "by bytes it is (3/4) / (2 * 7/8) = 0.43"
