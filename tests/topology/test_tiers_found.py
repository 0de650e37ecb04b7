"""Tiers from facts: those of known machines, and coarser ones with a line where something is unknown."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from toolkit.topology.facts import Fact, LinkFact, Topology, unknown
from toolkit.topology.links.matrix import disjoint_cliques
from toolkit.topology.machine_facts import machines, topology_of_machine
from toolkit.topology.tiers_found import tiers_of_topology
from toolkit.topology.traffic import Traffic, dimension_cost


def found(topology, ranks_per_node=None):
    notes: list[str] = []
    return tiers_of_topology(topology, ranks_per_node, notes), notes


def changed(topology: Topology, number: int, **parts) -> Topology:
    """The topology with one node's hardware changed."""
    nodes = list(topology.nodes)
    nodes[number] = replace(nodes[number], hardware=replace(nodes[number].hardware, **parts))
    return replace(topology, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("machine", "leaves", "groups"),
    [
        ("dgx-a100", [2, 1], {"clique": [8] * 3, "node": [8] * 3, "leaf": [16, 8], "cluster": [24]}),
        ("dgx-1", [1, 1], {"clique": [4] * 4, "node": [8] * 2, "leaf": [8] * 2, "cluster": [16]}),
        ("gb200", [18, 18], {"node": [4] * 36, "clique": [72] * 2, "leaf": [72] * 2, "cluster": [144]}),
        ("gb200", [19], {"node": [4] * 19, "clique": [72, 4], "leaf": [76], "cluster": [76]}),
        ("gb200", [1, 1], {"clique": [4] * 2, "node": [4] * 2, "leaf": [4] * 2, "cluster": [8]}),
        ("pcie-8", [1, 1], {"switch": [2] * 8, "socket": [4] * 4, "node": [8] * 2, "leaf": [8] * 2, "cluster": [16]}),
    ],
)
def test_known_machines_have_the_tiers_of_their_makers(machine, leaves, groups):
    """Ranks are numbered from GPU to GPU, so that groups are stretches of them."""
    tiers, notes = found(topology_of_machine(machine, leaves))
    assert {level.name: np.bincount(level.group_of).tolist() for level in tiers.levels} == groups
    assert list(groups) == list(tiers.names) and all((np.diff(level.group_of) >= 0).all() for level in tiers.levels)
    assert not notes


@pytest.mark.parametrize(
    ("machine", "carries", "said"),
    [
        ("dgx-a100", {"clique": 300, "leaf": 25}, "12 links according to NVIDIA DGX A100 user guide; NVLink 3: 25 GB/s per link"),
        ("dgx-1", {"clique": 75, "node": 25, "leaf": 6.25}, "1 link according to NVIDIA DGX-1 user guide; NVLink 2: 25 GB/s"),
        ("gb200", {"clique": 900, "leaf": 50}, "18 links according to NVIDIA GB200 NVL72 data sheet; NVLink 5: 50 GB/s per link"),
        ("pcie-8", {"switch": 25, "socket": 12, "node": 8, "leaf": 1.5625},
         "PCIe 4.0 x16: 31.5 GB/s according to PCI-SIG, minus the cost of the path between sockets"),
    ],
)  # fmt: skip
def test_links_carry_what_their_makers_say(machine, carries, said):
    tiers, _ = found(topology_of_machine(machine, [2, 2] if machine != "gb200" else [18]))
    links = {level.name: level.link for level in tiers.levels}
    assert {name: links[name].bytes_per_s / 1e9 for name in carries} == carries
    assert links["node"].source.startswith(said)
    assert all(link.source for link in links.values())


@pytest.mark.parametrize(
    ("machine", "members", "gigabytes_per_s"),
    [
        ("dgx-1", [8, 9], 25),  # one NVLink, on the second node
        ("dgx-1", [0, 3], 50),  # two
        ("dgx-1", [0, 2, 3], 50),  # one on the weakest edge, to each of two others
        ("dgx-1", [4, 5, 6, 7], 75),
        ("dgx-a100", [0, 3], 300),  # a switch lets all links lead anywhere
        ("dgx-a100", [0, 3, 4, 5], 300),
        ("gb200", [0, 1], 900),
    ],
)
def test_a_part_of_a_clique_has_the_nvlinks_of_its_own_pairs(machine, members, gigabytes_per_s):
    tiers, _ = found(topology_of_machine(machine, [1, 1]))
    cost = dimension_cost(tiers, np.array([members]), Traffic("send", 1e9))
    assert (tiers.names[cost.busiest], tiers.names[cost.worst]) == ("clique", "clique")
    assert cost.seconds == pytest.approx(1 / gigabytes_per_s + 3e-6)


def test_the_slowest_pair_of_a_dimension_counts_and_pairs_across_cliques_go_by_the_node():
    tiers, _ = found(topology_of_machine("dgx-1", [1]))
    pairs = np.array([[0, 3], [1, 2], [4, 7], [5, 6]])
    traffic = Traffic("send", 1e9)
    assert dimension_cost(tiers, pairs, traffic).seconds == pytest.approx(1 / 50 + 3e-6)
    pairs[:2] = [[0, 1], [2, 3]]
    assert dimension_cost(tiers, pairs, traffic).seconds == pytest.approx(1 / 25 + 3e-6)
    pairs = np.array([[0, 4], [1, 5], [2, 6], [3, 7]])
    assert tiers.names[dimension_cost(tiers, pairs, traffic).busiest] == "node"


def test_latencies_are_those_of_the_page_whatever_the_hardware():
    page = (Path(__file__).parents[2] / "docs" / "topology.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"Latencies: (.*?)\. Running", page, re.DOTALL)
    on_page = {float(number) for number in re.findall(r"\d+", said)}
    known = [topology_of_machine(machine, [2, 2]) for machine in machines()]
    levels = [level for machine in known for level in found(machine)[0].levels]
    assert {round(level.link.latency_s * 1e6, 6) for level in levels} == on_page


@pytest.mark.parametrize(
    ("machine", "ranks", "gigabytes_per_s", "said"),
    [
        ("dgx-a100", 8, 25, "mlx5_0, mlx5_1: 400 Gbit/s for 2 ranks, from NVIDIA DGX A100 user guide"),
        ("dgx-a100", 7, 25, "mlx5_0, mlx5_1: 400 Gbit/s for 2 ranks"),  # the last has two NICs, the others none more
        ("dgx-a100", 1, 25, "PCIe 4.0 x16"),  # two NICs near, and a GPU has one way to them
        ("dgx-1", 4, 6.25, "mlx5_0: 100 Gbit/s for 2 ranks"),
        ("gb200", 1, 50, "mlx5_0: 400 Gbit/s for 1 rank,"),
        ("pcie-8", 1, 12.5, "mlx5_0: 100 Gbit/s for 1 rank,"),
        ("pcie-8", 9, 100 / 8 / 9, "mlx5_0: 100 Gbit/s for 9 ranks"),  # more ranks than GPUs
    ],
)
def test_a_rank_has_the_nics_next_to_its_gpu_and_shares_them(machine, ranks, gigabytes_per_s, said):
    tiers, _ = found(topology_of_machine(machine, [2]), ranks)
    link = tiers.levels[-1].link
    assert link.bytes_per_s == pytest.approx(gigabytes_per_s * 1e9) and link.source.startswith(said)


def with_rates(topology: Topology, rates: dict[str, float | None]) -> Topology:
    """The topology with other rates of its NICs; None is a port that is down."""
    nics = []
    for nic in topology.nodes[0].hardware.nics.value:
        rate = rates.get(nic.name, nic.ports[0].rate_gbit_per_s.value)
        fact = unknown("/sys", "down") if rate is None else Fact(rate, "/sys", "direct")
        nics.append(replace(nic, ports=(replace(nic.ports[0], rate_gbit_per_s=fact),)))
    return changed(topology, 0, nics=Fact(tuple(nics), "/sys", "direct"))


@pytest.mark.parametrize(
    ("rates", "gbit_per_s", "said"),
    [
        ({"mlx5_0": 25.0}, 100, "mlx5_1: 200 Gbit/s for 2 ranks, from /sys"),  # it is for storage
        ({"mlx5_0": None}, 100, "mlx5_1: 200 Gbit/s for 2 ranks"),
        # Two GPUs go over the NICs of the others, and these have no others.
        ({"mlx5_0": None, "mlx5_1": None}, 150, "mlx5_2, mlx5_3, mlx5_4 and 3 more: 1200 Gbit/s for 8 ranks"),
        (dict.fromkeys(f"mlx5_{number}" for number in range(8)), 12.5, "assumed 100 Gbit/s per node, for 8 ranks"),
    ],
)
def test_slow_nics_and_those_that_are_down_carry_nothing(rates, gbit_per_s, said):
    tiers, notes = found(with_rates(topology_of_machine("dgx-a100", [1]), rates))
    link = tiers.levels[-1].link
    assert link.bytes_per_s == pytest.approx(gbit_per_s * 1e9 / 8) and link.source.startswith(said)
    assert notes == (["node0: the rate of its NICs is unknown"] if said.startswith("assumed") else [])


def test_a_nic_of_which_a_link_is_unknown_may_be_the_nearest():
    """So that the GPU may talk over any of them."""
    topology = topology_of_machine("gb200", [1])
    links = []
    for link in topology.nodes[0].hardware.links:
        links.append(replace(link, pairs=tuple(pair for pair in link.pairs if pair != ("GPU0", "mlx5_3"))))
    tiers, _ = found(changed(topology, 0, links=tuple(links)), 1)
    assert tiers.levels[-1].link.source.startswith("mlx5_0, mlx5_1, mlx5_2 and 1 more: 1600 Gbit/s for 1 rank")


def test_gpus_alone_on_their_sockets_slow_nothing_down():
    """Of two kinds of node the one without a pair on a socket has no say in what a socket carries."""
    topology = topology_of_machine("pcie-8", [2])
    first = topology.nodes[0].hardware
    two = tuple(gpu for gpu in first.gpus if gpu.index in (0, 4))
    tiers, _ = found(changed(topology, 1, gpus=two, gpu_count=Fact(2, "test", "direct")))
    assert {level.name: level.link.bytes_per_s for level in tiers.levels}["socket"] == 12e9


def test_quads_with_a_gpu_that_has_no_nvlink_to_the_other_one_meet_over_pcie():
    topology = topology_of_machine("dgx-1", [1])
    links = topology.nodes[0].hardware.links
    cut = [replace(link, pairs=tuple(pair for pair in link.pairs if pair != ("GPU2", "GPU6"))) for link in links]
    cut.append(LinkFact(Fact("SYS", "test", "direct"), (("GPU2", "GPU6"),)))
    tiers, _ = found(changed(topology, 0, links=tuple(cut)))
    link = tiers.levels[1].link
    assert (tiers.levels[1].name, link.bytes_per_s) == ("node", 4e9)
    assert link.source == "PCIe 3.0 x16: 15.75 GB/s according to PCI-SIG, minus the cost of the path between sockets"


def test_an_unknown_link_splits_the_clique_and_says_so():
    topology = topology_of_machine("dgx-a100", [2])
    links = topology.nodes[0].hardware.links
    nvlink = next(link for link in links if link.link.value == "NV12")
    rest = tuple(pair for pair in nvlink.pairs if pair != ("GPU2", "GPU5"))
    lost = LinkFact(unknown("NVML", "damaged"), (("GPU2", "GPU5"),))
    others = tuple(link for link in links if link is not nvlink)
    tiers, notes = found(changed(topology, 0, links=(replace(nvlink, pairs=rest), lost, *others)))
    assert sorted(np.bincount(tiers.levels[0].group_of)) == [1, 7, 8]
    assert notes == ["node0: the links of GPU2-GPU5 are unknown, so toolkit assumes the slowest path"]


def test_without_facts_there_are_nodes_and_the_cluster():
    topology = topology_of_machine("dgx-a100", [2])
    empty = changed(changed(topology, 0, links=(), gpus=(), gpu_count=unknown("NVML", "no driver")), 1, links=())
    nodes = tuple(
        replace(node, switches=unknown("SLURM_TOPOLOGY_ADDR", "not set"), gpu_fabrics=()) for node in empty.nodes
    )
    tiers, notes = found(Topology(nodes, {}), 8)
    assert tiers.names == ("socket", "node", "cluster")
    assert sorted(np.bincount(tiers.levels[0].group_of)) == [1] * 8 + [2] * 4, "GPUs that nobody knows meet in the node"
    assert "node0: the number of GPUs is unknown: no driver" in notes
    assert any(line.startswith("node0, node1: the leaf switch is unknown (not set)") for line in notes)


def test_a_fabric_that_nobody_knows_ends_at_the_node():
    topology = topology_of_machine("gb200", [4])
    nodes = tuple(replace(node, gpu_fabrics=(unknown("NVML", "no NVML"),) * 4) for node in topology.nodes)
    tiers, notes = found(Topology(nodes, {}))
    assert tiers.sizes("clique") == (4,)
    assert notes == [
        "node0, node1, node2 and 1 more: the NVLink fabric is unknown (no NVML), so toolkit assumes no NVLink to other nodes"
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


def test_ranks_stand_on_the_gpus_that_they_named():
    """GPUs 0 and 1 are behind one switch; ranks 0 and 1 were shown GPUs 7 and 0."""
    topology = topology_of_machine("pcie-8", [1])
    uuids = tuple(Fact(f"GPU-{gpu}", "NVML", "direct") for gpu in range(8))
    node = replace(topology.nodes[0], gpu_uuids=uuids)
    host = node.host.value
    named = replace(topology, nodes=(node,), ranks_by_host={host: (0, 1)}, gpu_of_rank={0: "GPU-7", 1: "GPU-0"})
    by_number = replace(named, gpu_of_rank={})
    switch = {name: found(one)[0].levels[0] for name, one in (("named", named), ("by number", by_number))}
    assert switch["by number"].name == switch["named"].name == "switch"
    assert len(set(switch["by number"].group_of)) == 1, "GPU 0 and 1"
    assert len(set(switch["named"].group_of)) == 2, "GPU 7 and 0"


def test_a_gpu_that_the_node_did_not_tell_of_is_a_note_once():
    topology = topology_of_machine("pcie-8", [1])
    uuids = tuple(Fact(f"GPU-{gpu}", "NVML", "direct") for gpu in range(8))
    node = replace(topology.nodes[0], gpu_uuids=uuids)
    ranks = {node.host.value: (0, 1, 2)}
    lost = replace(topology, nodes=(node,), ranks_by_host=ranks, gpu_of_rank={0: "GPU-0", 1: "GPU-x"})
    tiers, notes = found(lost)
    assert sorted(np.bincount(tiers.levels[0].group_of)) == [1, 1, 1]
    assert notes == ["node0: ranks use GPUs that the node did not report, so toolkit knows no links inside the node"]
