"""Which rank stands where: groups in the tiers where they belong, and clear words where they cannot."""

from __future__ import annotations

import re
import time
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import sampled

from toolkit.errors import ToolkitError
from toolkit.topology.machine_facts import machines, topology_of_machine
from toolkit.topology.mesh_choices import nearest_meshes
from toolkit.topology.placement import DIMENSIONS, as_launched, groups_of, place
from toolkit.topology.tiers import Link, Tiers, tiers_of
from toolkit.topology.tiers_found import tiers_of_topology
from toolkit.topology.traffic import Traffic, dimension_cost


def cluster_of(machine: str, leaves: list[int], ranks_per_node: int | None = None) -> Tiers:
    return tiers_of_topology(topology_of_machine(machine, leaves), ranks_per_node)


def shuffled(tiers: Tiers, order: np.ndarray) -> Tiers:
    """The same cluster with ranks dealt to it in another order."""
    return tiers_of([(level.name, level.group_of[order].tolist(), level.link) for level in tiers.levels])


def cyclic(tiers: Tiers, nodes: int) -> Tiers:
    return shuffled(tiers, np.arange(tiers.size).reshape(nodes, -1).T.ravel())


def tiers_met(tiers: Tiers, placement, dimension: str) -> set[str]:
    return {tiers.names[at] for at, count in enumerate(placement.costs[dimension].groups_at) if count}


@pytest.mark.parametrize(
    ("machine", "leaves", "sizes", "where"),
    [
        ("dgx-a100", [4], {"tp": 8, "shard": 4}, {"tp": {"clique"}, "shard": {"leaf"}}),
        ("dgx-1", [4], {"tp": 4, "shard": 2, "replicate": 4}, {"tp": {"clique"}, "shard": {"node"}}),
        ("gb200", [18, 18], {"tp": 8, "replicate": 18}, {"tp": {"clique"}, "replicate": {"cluster"}}),
        ("pcie-8", [2], {"tp": 2, "shard": 4, "replicate": 2}, {"tp": {"switch"}}),
        ("dgx-a100", [4, 4], {"ep": 8, "shard": 32, "replicate": 2}, {"ep": {"clique"}, "shard": {"leaf"}}),
        ("dgx-a100", [2, 2], {"tp": 8, "pp": 2, "shard": 2}, {"tp": {"clique"}, "shard": {"leaf"}, "pp": {"cluster"}}),
    ],
)
@pytest.mark.parametrize("launched", ["block", "cyclic"])
def test_each_dimension_lies_where_it_belongs(machine, leaves, sizes, where, launched):
    tiers = cluster_of(machine, leaves)
    if launched == "cyclic":
        tiers = cyclic(tiers, sum(leaves))
    placement = place(tiers, sizes)
    assert {name: tiers_met(tiers, placement, name) for name in where} == where
    assert not placement.compromises


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Tiers, dict[str, int]]:
    """Any cluster of any machines' nodes with any mesh that fills it, ranks dealt in any order."""
    machine = draw(st.sampled_from(sorted(machines())))
    gpus = len(machines()[machine]["gpu_numa"])
    tiers = cluster_of(machine, draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    left, sizes = tiers.size, {}
    for name in draw(st.permutations(("tp", "shard", "pp", "cp"))):
        divisors = [n for n in range(1, left + 1) if left % n == 0 and (name != "tp" or gpus % n == 0)]
        sizes[name] = draw(st.sampled_from(divisors))
        left //= sizes[name]
    sizes["replicate"] = left
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(tiers.size)
    return shuffled(tiers, order), sizes


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_a_placement_holds_every_rank_once_and_is_never_dearer_than_the_launchers_order(case):
    tiers, sizes = case
    placement = place(tiers, sizes)
    assert placement.mesh.shape == tuple(sizes.get(name, 1) for name in DIMENSIONS)
    assert sorted(placement.mesh.ravel().tolist()) == list(range(tiers.size))
    assert placement.seconds <= as_launched(tiers, sizes).seconds
    if sizes["tp"] > 1:  # it divides the node: no group of it leaves one, or the clique of nodes
        around = max(tiers.names.index(name) for name in ("clique", "node") if name in tiers.names)
        node = tiers.levels[around].group_of
        groups = groups_of(placement.mesh, "tp")
        assert (node[groups] == node[groups][:, :1]).all()


def test_seven_of_eight_gpus_are_refused_where_tensor_parallel_groups_would_cross_nodes():
    tiers = cluster_of("dgx-a100", [8], ranks_per_node=7)
    with pytest.raises(ToolkitError, match=r"7 ranks per node are not divisible by tp = 4") as refused:
        place(tiers, {"tp": 4, "shard": 14})
    assert refused.value.fix == "set tp = 1 and replicate = 4"
    assert not place(tiers, {"tp": 7, "shard": 8}).compromises


def accepted(sizes: dict[str, int], fix: str, machine: str, nodes: int, ranks: int) -> int:
    """Take each choice of a fix, word by word, and place ranks by it; how many choices there were."""
    choices = re.split("; or |, or ", fix.removeprefix("set "))
    for choice in choices:
        taken = sizes | {name: int(size) for name, size in re.findall(r"(\w+) = (\d+)", choice)}
        asked = re.search(r"request (\d+) ranks per node", choice)
        place(cluster_of(machine, [nodes], int(asked[1]) if asked else ranks), taken)
    return len(choices)


@pytest.mark.parametrize("machine", sampled(["dgx-a100", "dgx-1", "pcie-8"], lambda case: case[0] != "dgx-a100"))
def test_every_choice_of_a_fix_is_accepted(machine):
    refused = choices = 0
    for nodes, ranks, tp, shard in product((1, 2, 3), range(1, 9), (1, 2, 3, 4, 6, 9), (1, 3)):
        tiers = cluster_of(machine, [nodes], ranks)
        ep = 2 if (nodes + tp) % 3 == 0 else 1
        sizes = {"tp": tp, "shard": shard, "ep": ep, "replicate": max(1, nodes * ranks // (tp * shard))}
        try:
            place(tiers, sizes)
        except ToolkitError as error:
            refused += 1
            choices += accepted(sizes, error.fix, machine, nodes, ranks)
    assert refused > 100 and choices > refused


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 8),
    st.fixed_dictionaries({name: st.integers(1, 9) for name in ("tp", "shard", "cp", "pp", "ep", "replicate")}),
)  # fmt: skip
def test_a_fix_that_is_taken_is_accepted_whatever_mesh_was_asked_for(nodes, ranks, sizes):
    try:
        place(cluster_of("dgx-a100", [nodes], ranks), sizes)
    except ToolkitError as error:
        accepted(sizes, error.fix, "dgx-a100", nodes, ranks)


@pytest.mark.parametrize(
    ("sizes", "fix"),
    [
        ({"tp": 3, "replicate": 5}, "set tp = 4 and replicate = 4, or tp = 2 and replicate = 8"),
        ({"tp": 4, "replicate": 2}, "set replicate = 4"),
        ({"tp": 2, "shard": 5}, "set shard = 4 and replicate = 2, or shard = 8"),
        ({"shard": 16, "ep": 3}, "set ep = 4, or ep = 2"),
        ({"shard": 32}, "set shard = 16"),
        ({"shard": 3, "tp": 5}, "set shard = 4 and tp = 4"),
    ],
)
def test_the_nearest_mesh_that_fills_two_nodes_is_named(sizes, fix):
    with pytest.raises(ToolkitError) as refused:
        place(cluster_of("dgx-a100", [2]), sizes)
    assert refused.value.fix == fix


def test_a_mesh_of_many_ranks_finds_its_fix_among_few_meshes():
    tried = []

    def is_allowed(mesh):
        tried.append(mesh)
        return mesh["tp"] in (1, 8)

    requested = {"pp": 17, "replicate": 1, "shard": 19, "cp": 23, "tp": 29, "ep": 1}
    found = nearest_meshes(55440, requested, is_allowed)
    assert len(tried) < 150_000, "a second's work"
    assert [prod(size for name, size in mesh.items() if name != "ep") for mesh in found] == [55440]


def test_a_group_wider_than_its_clique_is_a_stated_compromise():
    tiers = cluster_of("dgx-1", [2])
    (said,) = place(tiers, {"tp": 8, "shard": 2}).compromises
    assert said == "2 of 2 tp groups of 8 cross a clique (4 ranks) and communicate within a node"


def test_uneven_leaves_are_a_stated_compromise():
    tiers = cluster_of("dgx-a100", [3, 5])
    placement = place(tiers, {"tp": 8, "shard": 4, "replicate": 2})
    assert (
        "8 of 16 shard groups of 4 communicate within a cluster, the others within a finer tier"
        in placement.compromises
    )


def test_a_mesh_that_does_not_fill_the_ranks_is_refused_with_the_numbers():
    tiers = cluster_of("dgx-a100", [2])
    with pytest.raises(ToolkitError, match="expected a mesh of 16 ranks, got shard 4 x tp 8 = 32"):
        place(tiers, {"tp": 8, "shard": 4})
    with pytest.raises(ToolkitError, match="shard x cp = 16 is not divisible by ep = 3"):
        place(tiers, {"ep": 3, "shard": 16})


def test_the_bytes_of_a_dimension_decide_what_lies_near():
    tiers = cluster_of("dgx-a100", [4])
    heavy, light = Traffic("all-reduce", 1e9), Traffic("all-reduce", 1e6)
    sizes = {"shard": 8, "replicate": 4}
    near = place(tiers, sizes, {"shard": heavy, "replicate": light})
    assert tiers_met(tiers, near, "shard") == {"clique"}
    sizes = {"shard": 4, "replicate": 8}
    far = place(tiers, sizes, {"shard": light, "replicate": heavy})
    assert (tiers_met(tiers, far, "replicate"), tiers_met(tiers, far, "shard")) == ({"clique"}, {"leaf"})


def test_a_ring_costs_what_its_busiest_link_carries():
    """Two nodes of two ranks: a ring that crosses twice, and one that crosses at every step."""
    link = {"node": Link(0, 100.0, ""), "cluster": Link(0, 10.0, "")}
    tiers = tiers_of([("node", [0, 0, 1, 1], link["node"]), ("cluster", [0] * 4, link["cluster"])])
    traffic = Traffic("all-reduce", 1000.0)
    block = dimension_cost(tiers, np.array([[0, 1, 2, 3]]), traffic)
    dealt = dimension_cost(tiers, np.array([[0, 2, 1, 3]]), traffic)
    # 2 x 3/4 x 1000 bytes over each edge; the two ranks of a node share its 20 bytes a second.
    assert (block.seconds, dealt.seconds) == (1500 / 20, 2 * 1500 / 20)
    assert tiers.names[block.busiest] == "cluster" and block.groups_at == (0, 1)


def test_tiers_that_do_not_nest_are_refused():
    link = Link(0, 1, "")
    with pytest.raises(ToolkitError, match="expected each clique inside one node, got a clique that spans two"):
        tiers_of([("clique", [0, 0], link), ("node", [0, 1], link), ("cluster", [0, 0], link)])


def test_16384_ranks_are_placed_within_three_seconds():
    start = time.process_time()
    tiers = cyclic(cluster_of("dgx-a100", [32] * 64), 2048)
    sizes = {"tp": 8, "pp": 8, "shard": 16, "replicate": 16}
    assert prod(sizes.values()) == tiers.size == 16384
    placement = place(tiers, sizes)
    assert time.process_time() - start < 3.0, "0.7 s on an idle machine; a shared one takes longer"
    assert tiers_met(tiers, placement, "tp") == {"clique"} and tiers_met(tiers, placement, "shard") == {"leaf"}


def test_shards_stay_in_the_node_and_copies_go_across_by_nominal_figures():
    """What sharding leaves to all-reduce is a part of what is gathered."""
    for tiers in (cluster_of("dgx-a100", [4]), cyclic(cluster_of("dgx-a100", [4]), 4)):
        placement = place(tiers, {"shard": 8, "replicate": 4})
        assert tiers_met(tiers, placement, "shard") == {"clique"}
        assert tiers_met(tiers, placement, "replicate") == {"leaf"}


def test_groups_of_several_dimensions_follow_the_mesh():
    mesh = as_launched(cluster_of("dgx-a100", [1]), {"pp": 2, "replicate": 2, "shard": 2}).mesh
    assert groups_of(mesh, ("replicate", "shard")).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups_of(mesh, ("pp", "shard")).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
