"""Merging what ranks tell, and the groups that follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.topology.facts import Fact, NodeFacts, RankPlace, unknown
from toolkit.topology.gather import Contribution, merge
from toolkit.topology.groups import plan_groups, plan_reduction
from toolkit.topology.probe import unknown_hardware

NOTHING = unknown("test", "not asked")
HARDWARE = unknown_hardware("test", "not asked")


def contribute(hosts, node_of=None):
    """One contribution a rank, `hosts[rank]` being its host; local rank 0 brings the facts."""
    order = list(dict.fromkeys(hosts))
    told = []
    for rank, host in enumerate(hosts):
        local_rank = hosts[:rank].count(host)
        facts = NodeFacts(Fact(host, "test", "direct"), NOTHING, HARDWARE) if local_rank == 0 else None
        told.append(
            Contribution(RankPlace(rank, host, node_of[rank] if node_of else order.index(host), local_rank), facts)
        )
    return told


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_groups_cover_all_ranks_whatever_their_order_on_nodes(nodes, local_size, shuffle):
    hosts = [f"node{node}" for node in range(nodes) for _ in range(local_size)]
    shuffle.shuffle(hosts)  # block, cyclic and arbitrary distributions
    told = contribute(hosts)
    topology = merge(told)
    shuffle.shuffle(told)
    assert merge(told) == topology

    plan = plan_groups(topology)
    assert plan.hierarchical == (nodes > 1 and local_size > 1)
    if plan.hierarchical:
        ranks = list(range(nodes * local_size))
        assert sorted(sum(plan.node_groups, ())) == sorted(sum(plan.cross_groups, ())) == ranks
        assert all(len({hosts[rank] for rank in group}) == 1 for group in plan.node_groups)
        for index, group in enumerate(plan.cross_groups):
            assert [plan.node_groups[node][index] for node in range(nodes)] == list(group)


@pytest.mark.parametrize(
    ("hosts", "node_of", "reason"),
    [
        (["a", "a", "b"], None, "nodes have unequal numbers of ranks, 1 to 2"),
        (["a", "b"], None, "each of 2 nodes has one rank"),
        (["a", "a"], None, "all 2 ranks are on one node"),
        (["a"], None, "there is one rank"),
        (["a", None, "b", None], None, "the host of ranks 1, 3 is unknown"),
        (["localhost"] * 4, [0, 0, 1, 1], "ranks on host localhost report several node numbers, [0, 1]"),
        (["a", "b", "c", "c"], [0, 0, 1, 1], "node 0 has several host names, ['a', 'b']"),
    ],
)
def test_a_layout_without_two_levels_is_flat_and_says_why(hosts, node_of, reason):
    topology = merge(contribute(hosts, node_of))
    assert plan_groups(topology).reason == reason
    assert not plan_reduction(topology, "auto").hierarchical
    with pytest.raises(ToolkitError) as error:
        plan_reduction(topology, "hierarchical")
    assert reason in str(error.value) and "parallel.reduction" in str(error.value)


def test_the_users_choice_is_kept():
    topology = merge(contribute(["a", "a", "b", "b"]))
    assert plan_reduction(topology, "auto").reason == "2 nodes with 2 ranks each"
    assert not plan_reduction(topology, "flat").hierarchical
    with pytest.raises(ToolkitError, match=r'expected "auto", "flat" or "hierarchical", got .fast.'):
        plan_reduction(topology, "fast")
