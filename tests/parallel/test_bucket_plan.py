"""Plans of bucket sizes: the best of all partitions, small at the end where the wait is exposed."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from toolkit.parallel.bucket_plan import Link, plan_buckets

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=8)


def end_of(cuts: tuple[int, ...], ready_s: list[float], sizes: list[int], link: Link) -> float:
    end = 0.0
    for start, after in pairwise((0, *cuts, len(sizes))):
        end = max(end, ready_s[after - 1]) + link.seconds(sum(sizes[start:after]))
    return end


@given(SIZES, st.data())
def test_no_other_partition_ends_earlier(sizes, data):
    gaps = data.draw(st.lists(st.floats(0, 5), min_size=len(sizes), max_size=len(sizes)))
    ready_s = [sum(gaps[: number + 1]) for number in range(len(sizes))]
    link = Link(data.draw(st.floats(0, 3)), data.draw(st.floats(0, 0.01)))
    plan = plan_buckets(ready_s, sizes, link)
    assert sum(plan.sizes_bytes) == sum(sizes)
    everything = [
        end_of(cuts, ready_s, sizes, link)
        for count in range(len(sizes))
        for cuts in combinations(range(1, len(sizes)), count)
    ]
    assert abs(plan.ends_s - min(everything)) < 1e-9
    cuts = [sum(plan.sizes_bytes[:number]) for number in range(1, len(plan.sizes_bytes))]
    up_to = {sum(sizes[:number]): number for number in range(len(sizes) + 1)}
    assert abs(end_of(tuple(up_to[cut] for cut in cuts), ready_s, sizes, link) - plan.ends_s) < 1e-9


def test_a_long_latency_gives_one_bucket_and_a_short_one_a_small_last_bucket():
    ready_s, sizes = [0.1 * number for number in range(1, 11)], [1 << 20] * 10
    assert plan_buckets(ready_s, sizes, Link(10.0, 1e-9)).sizes_bytes == (10 << 20,)
    assert plan_buckets(ready_s, sizes, Link(0.0001, 1e-8)).sizes_bytes[-1] == 1 << 20
    assert plan_buckets([0.5], [4], Link(0.1, 0.0)).ends_s == 0.6
