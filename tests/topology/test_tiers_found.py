"""Tiers from facts: those of known machines, and coarser ones with a line where something is unknown."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from toolkit.topology.facts import Fact, LinkFact, Topology, unknown
from toolkit.topology.links import disjoint_cliques
from toolkit.topology.machine_facts import topology_of_machine
from toolkit.topology.machines import MACHINES, cluster_of
from toolkit.topology.tiers_found import tiers_of_topology


def found(topology, ranks_per_node=None):
    notes: list[str] = []
    return tiers_of_topology(topology, ranks_per_node, notes), notes


def changed(topology: Topology, number: int, **parts) -> Topology:
    """The topology with one node's hardware changed."""
    nodes = list(topology.nodes)
    nodes[number] = replace(nodes[number], hardware=replace(nodes[number].hardware, **parts))
    return replace(topology, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("machine", "leaves"),
    [("dgx-a100", [2, 1]), ("dgx-1", [2, 2]), ("gb200", [18, 18]), ("gb200", [20]), ("pcie-8", [2, 2])],
)
def test_known_machines_have_the_tiers_that_planning_knows(machine, leaves):
    tiers, notes = found(topology_of_machine(machine, leaves))
    planned = cluster_of(MACHINES[machine], leaves)
    assert tiers.names == planned.names
    for level, other in zip(tiers.levels, planned.levels, strict=True):
        assert np.array_equal(level.group_of, other.group_of), level.name
    assert not notes


@pytest.mark.parametrize(
    ("machine", "tier", "gigabytes_per_s"),
    [
        ("dgx-a100", "clique", 300),
        ("gb200", "clique", 900),
        ("dgx-1", "clique", 75),
        ("dgx-a100", "leaf", 25),
        ("pcie-8", "switch", 25),
    ],
)
def test_links_carry_what_their_makers_say(machine, tier, gigabytes_per_s):
    tiers, _ = found(topology_of_machine(machine, [2, 2] if machine != "gb200" else [18]))
    link = next(level.link for level in tiers.levels if level.name == tier)
    assert link.bytes_per_s == gigabytes_per_s * 1e9 and link.source


def test_an_unknown_link_splits_the_clique_and_says_so():
    topology = topology_of_machine("dgx-a100", [2])
    links = topology.nodes[0].hardware.links
    nvlink = next(link for link in links if link.link.value == "NV12")
    rest = tuple(pair for pair in nvlink.pairs if pair != ("GPU2", "GPU5"))
    lost = LinkFact(unknown("NVML", "damaged"), (("GPU2", "GPU5"),))
    others = tuple(link for link in links if link is not nvlink)
    tiers, notes = found(changed(topology, 0, links=(replace(nvlink, pairs=rest), lost, *others)))
    assert sorted(np.bincount(tiers.levels[0].group_of)) == [1, 7, 8]
    assert notes == ["node0: the links of GPU2-GPU5 are unknown, so that they meet in the node alone"]


def test_without_facts_there_are_nodes_and_the_cluster():
    topology = topology_of_machine("dgx-a100", [2])
    empty = changed(changed(topology, 0, links=(), gpus=(), gpu_count=unknown("NVML", "no driver")), 1, links=())
    nodes = tuple(
        replace(node, switches=unknown("SLURM_TOPOLOGY_ADDR", "not set"), gpu_fabrics=()) for node in empty.nodes
    )
    tiers, notes = found(Topology(nodes, {}), 8)
    assert tiers.names == ("socket", "node", "cluster")
    assert sorted(np.bincount(tiers.levels[0].group_of)) == [1] * 8 + [2] * 4, "GPUs that nobody knows meet in the node"
    assert "node0: how many GPUs there are is unknown: no driver" in notes
    assert any(line.startswith("node0, node1: the leaf switch is unknown (not set)") for line in notes)


def test_a_fabric_that_nobody_knows_ends_at_the_node():
    topology = topology_of_machine("gb200", [4])
    nodes = tuple(replace(node, gpu_fabrics=(unknown("NVML", "no NVML"),) * 4) for node in topology.nodes)
    tiers, notes = found(Topology(nodes, {}))
    assert tiers.sizes("clique") == (4,)
    assert notes == [
        "node0, node1, node2 and 1 more: the NVLink fabric is unknown (no NVML), so that NVLink is taken to end at the node"
    ]


def test_a_fabric_of_one_node_is_a_clique_inside_it():
    topology = topology_of_machine("gb200", [2])
    nodes = tuple(
        replace(node, gpu_fabrics=(Fact(f"fabric{number}", "NVML", "direct"),) * 4)
        for number, node in enumerate(topology.nodes)
    )
    assert found(Topology(nodes, {}))[0].names == ("clique", "node", "leaf", "cluster")


def test_leaves_that_one_clique_lies_in_are_one():
    topology = topology_of_machine("gb200", [2, 2])
    joined = (Fact("rack", "NVML", "direct"),) * 4
    nodes = tuple(
        replace(node, gpu_fabrics=joined) if number in (1, 2) else node for number, node in enumerate(topology.nodes)
    )
    tiers, notes = found(Topology(nodes, {}))
    assert tiers.sizes("leaf") == (16,) and "an NVLink clique has nodes below several leaf switches" in notes[-1]


def test_ranks_stand_on_the_gpus_of_their_local_ranks():
    topology = topology_of_machine("dgx-1", [2])
    ranks = {"node0": (0, 2, 4, 6, 8, 10, 12, 14), "node1": (1, 3, 5, 7, 9, 11, 13, 15)}
    tiers, _ = found(Topology(topology.nodes, ranks))
    assert [sorted(np.flatnonzero(tiers.levels[0].group_of == n)) for n in range(4)] == [
        [0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15],
    ]  # fmt: skip
    lost = Topology(topology.nodes[:1], {"node0": (0, 1), "node1": (2,)}, (3,))
    tiers, notes = found(lost)
    assert tiers.size == 4 and len(np.unique(tiers.levels[1].group_of)) == 3 and len(notes) == 2


def test_cliques_are_disjoint_and_the_largest_first():
    assert disjoint_cliques({0: {1, 2}, 1: {0, 2}, 2: {0, 1, 3}, 3: {2}}) == ((0, 1, 2),)
    generator = random.Random(3)
    for _ in range(200):
        size = generator.randint(1, 9)
        neighbours = {one: set() for one in range(size)}
        for one in range(size):
            for other in range(one):
                if generator.random() < 0.6:
                    neighbours[one].add(other)
                    neighbours[other].add(one)
        taken = disjoint_cliques(neighbours)
        members = [one for clique in taken for one in clique]
        assert len(members) == len(set(members))
        assert all(other in neighbours[one] for clique in taken for one in clique for other in clique if one != other)
        left = set(neighbours) - set(members)
        assert not any(other in neighbours[one] for one in left for other in left), "no pair is left over"
