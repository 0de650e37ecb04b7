"""The rounds of each algorithm send what the algorithm sends, and their times follow from the busiest link."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.comm.algorithms import ALGORITHMS
from toolkit.comm.cost.model import Line, Links, Segment, fit, predict

BLOCK = ((0, 1), (2, 3), (4, 5), (6, 7))
CYCLIC = ((0, 4), (1, 5), (2, 6), (3, 7))


def straight(latency_s: float, bytes_per_s: float) -> Line:
    return Line((Segment(0, latency_s, 1 / bytes_per_s),))


SLOW_NETWORK = Links(straight(0, 10.0), straight(0, 10.0), straight(0, 10.0), straight(0, 1e9), straight(0, 1e9), 0.0)


def sent(name: str, size: float, nodes) -> Counter:
    """Bytes that each place sends."""
    schedule = ALGORITHMS[name].schedule(size, nodes)
    total: Counter = Counter()
    for stage in schedule.stages:
        for one in stage:
            for sender, _, count in one.messages:
                total[sender] += count * one.repeats * schedule.segments
    return total


@pytest.mark.parametrize(
    ("name", "each"),
    [("ring", 2 * 7 / 8), ("flat", 2 * 7 / 8), ("direct", 2 * 7 / 8), ("tree", None), ("leader", None)],
)
def test_each_rank_sends_what_the_page_says(name, each):
    found = sent(name, 800.0, BLOCK)
    if each is not None:
        assert found == {place: pytest.approx(800 * each) for place in range(8)}
    busiest = {"tree": 3.0, "leader": 2 * 3 / 4 + 1}.get(name, each)
    assert max(found.values()) == pytest.approx(800 * busiest)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("nodes", [BLOCK, CYCLIC, ((0, 1, 2),), ((0,), (1,), (2,))])
def test_every_contribution_reaches_every_rank(name, nodes):
    """Who has heard of whom spreads along the messages; in the end all have heard of all."""
    heard = {place: {place} for node in nodes for place in node}
    for stage in ALGORITHMS[name].schedule(1.0, nodes).stages:
        for one in stage:
            for _ in range(one.repeats):
                before = {place: set(known) for place, known in heard.items()}
                for sender, receiver, _ in one.messages:
                    heard[receiver] |= before[sender]
    assert all(known == set(heard) for known in heard.values())


def test_a_ring_dealt_over_nodes_takes_as_much_longer_as_nodes_have_ranks():
    block, dealt = (predict("ring", 800.0, nodes, SLOW_NETWORK) for nodes in (BLOCK, CYCLIC))
    assert block == pytest.approx(2 * 7 / 8 * 800 / 10, rel=1e-6)
    assert dealt == pytest.approx(2 * block, rel=1e-6)


def test_two_tiers_leave_a_node_only_with_what_they_must():
    size = 64 * 2**20
    two_tiers = predict("hierarchical", size, CYCLIC, SLOW_NETWORK)
    assert two_tiers == pytest.approx(2 * 3 / 4 * size / 10, rel=0.01)
    assert two_tiers < predict("flat", size, CYCLIC, SLOW_NETWORK) / 2


def test_stages_of_segments_overlap():
    links = Links(straight(0, 1e6), straight(0, 1e6), straight(0, 1e6), straight(0, 1e6), straight(0, 1e6), 0.0)
    one, four = (predict("hierarchical", n * 2**21, BLOCK, links) for n in (1, 4))
    assert one < four < 4 * one


def test_small_messages_cost_their_number():
    late = Links(
        straight(1.0, 1e12), straight(1.0, 1e12), straight(1.0, 1e12), straight(1.0, 1e12), straight(1.0, 1e12), 0.0
    )
    found = {name: round(predict(name, 8.0, BLOCK, late)) for name in ("ring", "tree", "direct")}
    assert found == {"ring": 14, "tree": 6, "direct": 2}


@given(st.dictionaries(st.integers(1, 10**8), st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=5), min_size=2))
def test_a_line_goes_through_what_was_measured_and_never_down(samples):
    line = fit(samples)
    sizes = sorted(samples)
    times = [line.seconds(size) for size in sizes]
    assert times == sorted(times) or max(b - a for a, b in zip(times[1:], times, strict=False)) < 1e-6
    assert line.seconds(0) == 0 and line.seconds(sizes[-1] * 2) >= times[-1] - 1e-6
    last = sorted(samples[sizes[-1]])
    assert last[0] - 1e-6 <= times[-1] <= last[-1] + 1e-6


def test_each_segment_has_its_own_latency_and_bandwidth():
    line = fit({1000: [0.001], 10_000: [0.002], 110_000: [0.052]})
    assert line.seconds(5500) == pytest.approx(0.0015)
    assert line.seconds(60_000) == pytest.approx(0.027)
    assert line.seconds(220_000) == pytest.approx(0.104)
    assert line.bytes_per_s == pytest.approx(110_000 / 0.052)
