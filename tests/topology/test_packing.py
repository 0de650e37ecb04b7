"""Units joined to groups: each is in one, and few cross a tier."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toolkit.topology.placement import NOWHERE, pack


@st.composite
def clusters(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Places of units in nested tiers with groups of any sizes, and a size that divides their number."""
    size = draw(st.integers(1, 5))
    cliques = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    short = -sum(cliques) % size
    cliques += [short] * (short > 0)
    clique_of = np.repeat(np.arange(len(cliques)), cliques)
    node_of = clique_of // draw(st.integers(1, 3))
    places = np.stack([clique_of, node_of, np.zeros_like(clique_of)])
    return places[:, draw(st.permutations(range(places.shape[1])))], size


@given(clusters())
def test_every_unit_is_in_one_group_and_a_group_knows_where_it_lies(case):
    places, size = case
    groups, found = pack(places, size)
    assert sorted(groups.ravel()) == list(range(places.shape[1]))
    for members, place in zip(groups, found.T, strict=True):
        for tier in range(len(places)):
            labels = set(places[tier, members])
            assert place[tier] == (labels.pop() if len(labels) == 1 else NOWHERE)


@given(clusters())
def test_no_tier_holds_fewer_whole_groups_than_fit(case):
    places, size = case
    _, found = pack(places, size)
    assert np.sum(found[0] != NOWHERE) == sum(np.bincount(places[0]) // size)


def test_what_a_clique_leaves_over_is_joined_in_its_node_before_it_is_joined_across():
    cliques = np.repeat([0, 1, 2, 3], [5, 3, 5, 3])
    groups, found = pack(np.stack([cliques, cliques // 2, np.zeros_like(cliques)]), 4)
    assert (found[1] != NOWHERE).all() and (found[0] == NOWHERE).sum() == 2
    assert groups[0].tolist() == [0, 1, 2, 3]


def test_a_unit_that_crosses_a_tier_is_joined_with_nobody_in_it():
    places = np.array([[NOWHERE, NOWHERE, 0, 0], [0, 0, 0, 0]])
    groups, found = pack(places, 2)
    assert sorted(map(sorted, groups.tolist())) == [[0, 1], [2, 3]]
    assert found[0].tolist() == [NOWHERE, 0]
