"""Places of experts, and the rows that move between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from launch import results_of

from toolkit.parallel.experts.migration import _exchange_rows, exchanged


def busiest(loads, places, ranks) -> float:
    sums = [0.0] * ranks
    for load, place in zip(loads, places, strict=True):
        sums[place * ranks // len(places)] += load
    return max(sums)


@given(st.data(), st.sampled_from([(4, 2), (8, 2), (8, 4), (16, 4)]))
def test_exchanges_never_raise_the_load_of_the_busiest_rank(data, shape):
    experts, ranks = shape
    loads = data.draw(st.lists(st.floats(0, 100), min_size=experts, max_size=experts))
    places = data.draw(st.permutations(range(experts)))
    found = exchanged(loads, places, ranks)
    assert sorted(found) == list(range(experts))
    assert busiest(loads, found, ranks) <= busiest(loads, places, ranks) * (1 + 1e-9)


def test_two_hot_experts_of_a_rank_part():
    loads = [10.0, 10.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    found = exchanged(loads, range(8), 4)
    assert busiest(loads, found, 4) == 11.0
    assert sum(one != other for one, other in enumerate(found)) == 2, "one exchange is enough"


def _moved(world, sources):
    each = len(sources) // world.size
    rows = torch.arange(each * 6.0).view(each, 2, 3) + 100 * world.rank * each
    before = [torch.empty_like(rows) for _ in range(world.size)]
    dist.all_gather(before, rows)
    _exchange_rows(rows, sources, dist.group.WORLD)
    wanted = torch.cat(before)[torch.tensor(sources[world.rank * each : (world.rank + 1) * each])]
    return torch.equal(rows, wanted)


def test_rows_move_to_their_places(tmp_path):
    assert results_of(_moved, 2, tmp_path, [5, 1, 0, 3, 4, 2]) == [True, True]
