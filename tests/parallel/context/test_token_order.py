"""Ranks share a sequence: each has one part of its head and one of its tail, and together they have all tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.parallel.context.order import own_positions, own_tokens, sequence_order


def test_a_rank_has_a_part_of_the_head_and_one_of_the_tail():
    assert own_positions(4, 0, 2).tolist() == [0, 1, 6, 7]
    assert own_positions(4, 1, 2).tolist() == [2, 3, 4, 5]


@given(ranks=st.integers(1, 6), part=st.integers(1, 4))
def test_parts_are_put_back_together(ranks, part):
    text = torch.randn(2, 2 * ranks * part, 3)
    together = torch.cat([own_tokens(text, place, ranks) for place in range(ranks)], 1)
    order = sequence_order(2 * part, ranks) if ranks > 1 else torch.arange(2 * part)
    assert torch.equal(together.index_select(1, order), text)


@given(ranks=st.integers(2, 6), part=st.integers(1, 4))
def test_causal_attention_costs_every_rank_the_same(ranks, part):
    positions = [own_positions(2 * part, place, ranks) for place in range(ranks)]
    assert len({int((one + 1).sum()) for one in positions}) == 1


def test_a_length_that_does_not_fit_is_refused_with_the_next_ones():
    with pytest.raises(ToolkitError) as refused:
        own_tokens(torch.zeros(1, 10), 0, 2)
    assert str(refused.value) == (
        "parallel.cp: expected sequences with a multiple of 2 x cp = 4 tokens, got 10. Fix: use 8 or 12 tokens, or another cp"
    )


def test_samples_that_are_no_sequences_are_refused():
    with pytest.raises(ToolkitError, match=r"expected a batch of sequences, \(batch, tokens\), got the shape \(3,\)"):
        own_tokens(torch.zeros(3), 0, 2)
