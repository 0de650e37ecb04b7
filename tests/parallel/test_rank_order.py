"""Which rank stands where in a mesh: near ones together, each once, and a line that says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from clusters_of_ranks import in_turn, topology_of_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.parallel.rank_order import order_ranks
from toolkit.topology.facts import Topology, unknown
from toolkit.topology.placement import DIMENSIONS, groups_of
from toolkit.topology.tiers_found import tiers_of_topology
from toolkit.topology.traffic import Traffic

GPUS = {"dgx-a100": 8, "dgx-1": 8, "gb200": 4, "pcie-8": 8}
CYCLIC = topology_of_ranks("dgx-a100", [4], 8, in_turn(4, 8))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Topology, ParallelTable]:
    """Ranks dealt in any order to nodes of any machine, and a mesh that fills them."""
    machine = draw(st.sampled_from(sorted(GPUS)))
    leaves = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    each = GPUS[machine]
    size = sum(leaves) * each
    dealt = draw(
        st.sampled_from(
            [list(range(size)), in_turn(sum(leaves), each), np.random.default_rng(size).permutation(size).tolist()]
        )
    )
    left, sizes = size, {}
    for name in draw(st.permutations(("tp", "shard", "pp", "cp"))):
        divisors = [n for n in range(1, left + 1) if left % n == 0 and (name != "tp" or each % n == 0)]
        sizes[name] = draw(st.sampled_from(divisors))
        left //= sizes[name]
    lines = sizes["shard"] * sizes["cp"]
    sizes["ep"] = draw(st.sampled_from([n for n in range(1, lines + 1) if lines % n == 0]))
    return topology_of_ranks(machine, leaves, each, dealt), ParallelTable(**sizes)


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_every_rank_stands_once_and_in_one_group_of_each_dimension(case):
    topology, parallel = case
    mesh = order_ranks(parallel, topology).placement.mesh
    sizes = parallel.sizes(topology.size)
    assert sorted(mesh.ravel().tolist()) == list(range(topology.size))
    for names in (*DIMENSIONS, ("replicate", "shard"), ("shard", "cp"), "ep"):
        groups = groups_of(mesh, names, parallel.ep)
        named = (names,) if isinstance(names, str) else names
        assert groups.shape[1] == np.prod([sizes[name] for name in named])
        assert sorted(groups.ravel().tolist()) == list(range(topology.size))
    for group in groups_of(mesh, ("replicate", "shard")):  # all in it differ in these two dimensions alone
        places = np.stack([np.argwhere(mesh == rank)[0] for rank in group])
        assert (places[:, [0, 3, 4]] == places[0, [0, 3, 4]]).all()
        assert (places[:, 1] * sizes["shard"] + places[:, 2]).tolist() == list(range(len(group)))


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_tensor_parallel_groups_lie_in_a_clique_that_can_hold_them_evenly(case):
    topology, parallel = case
    tiers = tiers_of_topology(topology)
    clique = next((level for level in tiers.levels if level.name == "clique"), None)
    if clique is None or any(count % parallel.tp for count in tiers.sizes("clique")):
        return
    of_rank = clique.group_of[groups_of(order_ranks(parallel, topology).placement.mesh, "tp")]
    assert (of_rank == of_rank[:, :1]).all()


def test_the_line_says_the_mesh_where_its_groups_meet_and_what_it_saves():
    order = order_ranks(ParallelTable(tp=8, shard=2), CYCLIC)
    assert order.line.startswith(
        "mesh: replicate 2 x shard 2 x tp 8; ranks placed (replicate in leaf, shard in leaf, tp in clique): predicted "
    )
    assert order.line.endswith("to save 64% of the 305 ms of communication per step as launched, by nominal traffic")


def test_what_is_unknown_is_counted_and_one_fact_is_one():
    whole = topology_of_ranks("dgx-1", [2], 8)
    nodes = tuple(replace(node, switches=unknown("test", "nobody was asked")) for node in whole.nodes)
    line = order_ranks(ParallelTable(), replace(whole, nodes=nodes)).line
    assert line.endswith("; 1 topology fact is unknown, see `toolkit topo show`")


def test_the_models_own_traffic_decides_where_it_is_given():
    parallel = ParallelTable(shard=8)
    nominal = order_ranks(parallel, CYCLIC)
    assert groups_of(nominal.placement.mesh, "shard")[0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28]
    idle = dict.fromkeys(("shard", "replicate"), Traffic("send", 0.0))
    own = order_ranks(parallel, CYCLIC, idle)
    assert (
        own.line == "mesh: replicate 4 x shard 8; ranks as launched: no other order is faster by this model's traffic"
    )


@pytest.mark.parametrize(
    ("topology", "settings", "keeps_order", "reason"),
    [
        (CYCLIC, {"placement": "launched"}, True, "by parallel.placement"),
        (replace(CYCLIC, conflicts=("node3 says two things",)), {}, True, "node3 says two things"),
        (replace(CYCLIC, nodes=()), {}, True, "no node has reported its topology"),
        (Topology((), {}, unplaced_ranks=tuple(range(32))), {}, True, "the hosts of 32 ranks are unknown"),
        (CYCLIC, {}, False, "this torch sorts the ranks of a group; torch 2.13 would save "),
        (topology_of_ranks("dgx-a100", [4], 8), {}, True, "no other order is faster by nominal traffic"),
    ],
)
def test_ranks_stand_as_launched_where_nothing_better_is_known_or_allowed(topology, settings, keeps_order, reason):
    order = order_ranks(ParallelTable(tp=8, **settings), topology, keeps_order=keeps_order)
    assert order.placement.mesh.ravel().tolist() == list(range(32))
    assert f"mesh: replicate 4 x tp 8; ranks as launched: {reason}" in order.line


@pytest.mark.parametrize("topology", [CYCLIC, replace(CYCLIC, nodes=())])
@pytest.mark.parametrize("placement", ["auto", "launched"])
def test_a_mesh_that_does_not_fill_the_ranks_is_refused_with_the_nearest(topology, placement):
    with pytest.raises(ToolkitError, match="expected a mesh of 32 ranks, got replicate 5 x tp 8 = 40") as refused:
        order_ranks(ParallelTable(replicate=5, tp=8, placement=placement), topology)
    assert refused.value.fix == "set replicate = 4"


def test_the_page_shows_the_lines():
    page = (Path(__file__).parents[2] / "docs" / "topology.md").read_text(encoding="utf-8")
    for parallel, dealt in ((ParallelTable(tp=2), in_turn(2, 2)), (ParallelTable(), None)):
        assert f"    {order_ranks(parallel, topology_of_ranks('dgx-1', [2], 2, dealt)).line}\n" in page


def test_a_lone_rank_is_a_mesh():
    assert order_ranks(ParallelTable(), topology_of_ranks("dgx-1", [1], 1)).line == "mesh: one rank"
