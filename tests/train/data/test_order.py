from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.train.data.order import SampleOrder, passes_of, share, split


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 5))
def test_every_epoch_reads_every_position_once(count, seed, epoch):
    order = SampleOrder(count, seed)
    assert sorted(order.positions(range(epoch * count, (epoch + 1) * count))) == list(range(count))


def test_epochs_and_seeds_give_different_orders_that_are_not_the_plain_one():
    order = SampleOrder(1000, seed=1)
    orders = [
        tuple(order.positions(range(1000))),
        tuple(order.positions(range(1000, 2000))),
        tuple(SampleOrder(1000, seed=2).positions(range(1000))),
        tuple(range(1000)),
    ]
    assert len(set(orders)) == 4
    for one in orders[:3]:
        at_home = sum(place == position for place, position in enumerate(one))
        assert at_home < 10, "a random permutation leaves about one position where it was"


@given(start=st.integers(0, 10**12), length=st.integers(0, 50))
def test_a_position_depends_on_the_global_index_only(start, length):
    order = SampleOrder(777, seed=5)
    together = list(order.positions(range(start, start + length)))
    assert together == [order.positions(range(i, i + 1))[0] for i in range(start, start + length)]


def test_no_sample_is_repeated_or_skipped_when_ranks_change_from_4_to_2_to_8():
    count, batch = 24 * 30, 24
    order = SampleOrder(count, seed=3)
    read: Counter[int] = Counter()
    cursor = 0
    for size, steps in ((4, 10), (2, 7), (8, 13)):
        for _ in range(steps):
            for rank in range(size):
                for part in split(share(cursor, batch, rank, size), 2):
                    read.update(order.positions(part).tolist())
            cursor += batch
    assert read == Counter(range(count))


@given(batch=st.integers(1, 500), size=st.integers(1, 64), first=st.integers(0, 1000))
def test_shares_are_even_and_cover_the_batch_in_order(batch, size, first):
    if batch < size:
        with pytest.raises(ToolkitError, match=f"set train.batch to {size}"):
            share(first, batch, 0, size)
        return
    shares = [share(first, batch, rank, size) for rank in range(size)]
    assert [index for one in shares for index in one] == list(range(first, first + batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(samples=st.integers(1, 100), at_most=st.integers(0, 120))
def test_micro_batches_cover_a_share(samples, at_most):
    parts = split(range(7, 7 + samples), at_most)
    assert [index for part in parts for index in part] == list(range(7, 7 + samples))
    assert all(0 < len(part) <= (at_most or samples) for part in parts)


@given(batch=st.integers(2, 100), size=st.integers(2, 12), at_most=st.integers(2, 12))
def test_ranks_with_fewer_samples_have_as_many_micro_batches(batch, size, at_most):
    if batch < size:
        return
    shares = [share(0, batch, rank, size) for rank in range(size)]
    found = [split(one, at_most, passes_of(batch, size, at_most)) for one in shares]
    assert len({len(parts) for parts in found}) == 1
    for one, parts in zip(shares, found, strict=True):
        assert [index for part in parts for index in part] == [*one]
        assert all(0 < len(part) <= at_most for part in parts)
