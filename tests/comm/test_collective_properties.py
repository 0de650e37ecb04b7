"""Every operation against its reference, on real ranks, over types, shapes, strides, ops and algorithms."""

import cases
import pytest
import torch
from cases import COMPLEX, FLOATS, INTEGERS, MOVED, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_pool import LAYOUTS
from sampling import sampled

from toolkit.comm import ring
from toolkit.comm.algorithms import ALGORITHMS

SIZES = (2, 3, 4, 8)
UNBOUND = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
shapes = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (7, 1)]),
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4)),
)
seeds = st.integers(0, 2**20)


@st.composite
def reductions(draw, shape=shapes):
    """A case and an op that has a meaning for its type."""
    dtype = draw(st.sampled_from((*FLOATS, *INTEGERS, *COMPLEX, torch.bool)))
    if dtype is torch.bool:
        op = draw(st.sampled_from(["min", "max"]))
    elif dtype.is_complex:
        op = draw(st.sampled_from(["sum", "avg"]))
    else:
        op = draw(st.sampled_from(["sum", "min", "max", "product", *(["avg"] if dtype.is_floating_point else [])]))
    values = draw(st.sampled_from(["plain", "special" if dtype.is_floating_point else "large"]))
    if dtype in (torch.int32, torch.int64):
        values = "plain"  # these wrap, as torch's do
    view = draw(st.sampled_from(["whole", "transposed", "strided", "conjugated"]))
    return Case(dtype, draw(shape), view, draw(seeds), values), op


def names_of(size):
    even = len(set(LAYOUTS[size])) == 1 and LAYOUTS[size][0] > 1
    return [name for name in ALGORITHMS if even or name != "hierarchical"]


@pytest.mark.parametrize(
    ("size", "name"), sampled([(size, name) for size in SIZES for name in names_of(size)], lambda case: case[0] < 8)
)
def test_all_reduce_equals_the_reference_with_the_same_bits_everywhere(ranks, size, name):
    @settings(UNBOUND, max_examples=10)
    @given(reductions(), st.booleans())
    def check(drawn, later):
        case, op = drawn
        answers = ranks(size).run(cases.all_reduce, case, op, name, later)
        assert len(set(answers)) == 1

    check()


@pytest.mark.parametrize("name", names_of(4))
@pytest.mark.parametrize("op", ["sum", "max"])
def test_large_tensors_take_many_pieces(ranks, name, op):
    """Three pieces of a ring's chunk, two segments of the hierarchical way, and not divisible by anything."""
    case = Case(torch.float32, (600_007,), seed=5)
    assert len(set(ranks(4).run(cases.all_reduce, case, op, name, False))) == 1


@pytest.mark.parametrize("size", sampled(SIZES, lambda case: case[0] < 8))
@pytest.mark.parametrize("op", ["sum", "product"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16], ids=str)
def test_small_integers_overflow_on_every_rank_and_never_wrap(ranks, size, op, dtype):
    case = Case(dtype, (2000,), seed=1, values="large")
    assert set(ranks(size).run(cases.all_reduce, case, op, "flat", False)) == {"overflow"}
    # One rank holds all, and alone can see it.
    assert set(ranks(size).run(cases.reduce_parts, case, op, [2000, *[0] * (size - 1)], 0)) == {"overflow"}


@pytest.mark.parametrize("size", sampled(SIZES, lambda case: case[0] < 8))
def test_reduce_and_reduce_scatter_equal_the_reference(ranks, size):
    @settings(UNBOUND, max_examples=20)
    @given(
        st.data(), st.lists(st.integers(0, 9), min_size=size, max_size=size), st.booleans(), st.integers(0, size - 1)
    )
    def check(data, lengths, equal, root):
        parts = [4] * size if equal else lengths
        shape = st.sampled_from([(sum(parts),), (sum(parts), 3), (sum(parts), 0)])
        case, op = data.draw(reductions(shape))
        answers = ranks(size).run(cases.reduce_parts, case, op, None if equal else parts, root)
        assert len(set(answers)) == 1

    check()


@pytest.mark.parametrize("size", sampled(SIZES, lambda case: case[0] < 8))
def test_moved_data_keeps_its_bits_whatever_its_type(ranks, size):
    rows = st.lists(st.lists(st.integers(0, 5), min_size=size, max_size=size), min_size=size, max_size=size)

    @settings(UNBOUND, max_examples=15)
    @given(
        st.sampled_from(MOVED),
        shapes,
        seeds,
        st.sampled_from(["whole", "transposed", "strided"]),
        rows,
        st.integers(0, size - 1),
    )
    def check(dtype, shape, seed, view, lengths, root):
        ranks(size).run(cases.move, Case(dtype, shape, view, seed), root, lengths)

    check()


@pytest.mark.parametrize("size", sampled(SIZES, lambda case: case[0] < 8))
def test_ranks_send_and_receive_in_circles_and_in_turns(ranks, size):
    for shape in ((5,), (0,), (300_000,)):
        ranks(size).run(cases.pass_round, Case(torch.float32, shape, "strided"))


def in_step(state, case, op, name):
    """The way a ring goes on a GPU, where nothing may be posted ahead."""
    ahead = ring._walk_ahead
    ring._walk_ahead = ring._walk_in_step
    try:
        return cases.all_reduce(state, case, op, name, False)
    finally:
        ring._walk_ahead = ahead


@pytest.mark.parametrize("name", ["ring", "double-buffered ring", "pipelined ring"])
def test_a_ring_that_goes_in_step_ends_with_the_same_bits_as_one_that_posts_ahead(ranks, name):
    for case in (Case(torch.float32, (400_003,), seed=3), Case(torch.bfloat16, (5,), seed=4)):
        answers = ranks(3).run(in_step, case, "sum", name) + ranks(3).run(cases.all_reduce, case, "sum", name, False)
        assert len(set(answers)) == 1


def one_has_nan(state, name, op):
    """Rank r holds it in element r: whoever has it, wherever it stands in the order of ranks."""
    tensor = torch.ones(state.world.size + 1)
    tensor[state.world.rank] = float("nan")
    return state.communicator.all_reduce(tensor, op, name).isnan().tolist()


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_nan_on_any_rank_is_in_the_smallest_and_the_largest(ranks, name, op):
    for answer in ranks(4).run(one_has_nan, name, op):
        assert answer == [True] * 4 + [False]
