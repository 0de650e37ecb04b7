from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.train.data import Padded, PadSamples, pad_to_multiple


@given(
    st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=20), min_size=1, max_size=8),
    st.integers(1, 16),
    st.integers(-5, 5),
)
def test_what_is_real_comes_back_and_the_rest_is_filled(sequences, multiple, fill):
    padded = pad_to_multiple([torch.tensor(one, dtype=torch.int64) for one in sequences], multiple, fill)
    longest = max(map(len, sequences))
    batch, length = padded.values.shape
    assert batch == len(sequences) and length % multiple == 0
    assert max(longest, 1) <= length < max(longest, 1) + multiple
    assert padded.lengths.tolist() == padded.mask.sum(1).tolist() == [len(one) for one in sequences]
    for row, one in zip(padded.values.tolist(), sequences, strict=True):
        assert row == one + [fill] * (length - len(one))


def test_sequences_of_vectors_and_of_numpy_are_taken():
    padded = pad_to_multiple([np.ones((2, 3), np.float32), torch.ones(5, 3)], 4, -1)
    assert padded.values.shape == (2, 8, 3) and padded.values[0, 2:].eq(-1).all() and padded.values[1, :5].eq(1).all()


def test_what_does_not_fit_together_is_refused():
    for wrong in ([torch.ones(2), torch.ones(2, 2)], [torch.ones(2), torch.ones(2).int()], [torch.tensor(1)]):
        with pytest.raises(ToolkitError, match="expected sequences that differ only in length, got"):
            pad_to_multiple(wrong)
    with pytest.raises(ToolkitError, match="no sequences to pad"):
        pad_to_multiple([])
    with pytest.raises(ToolkitError, match="multiple: expected 1 or more, got 0"):
        pad_to_multiple([[1]], 0)


def test_samples_are_padded_entry_by_entry():
    collate = PadSamples(multiple=4, values={"labels": -100})
    batch = collate([{"text": [1, 2], "labels": [3], "weight": 0.5, "name": "a"}, {"text": [4], "labels": [5, 6], "weight": 1.0, "name": "b"}])  # fmt: skip
    assert isinstance(batch["text"], Padded)
    assert batch["text"].values.tolist() == [[1, 2, 0, 0], [4, 0, 0, 0]]
    assert batch["labels"].values.tolist() == [[3, -100, -100, -100], [5, 6, -100, -100]]
    assert batch["weight"].tolist() == [0.5, 1.0] and batch["name"] == ["a", "b"]
    pair = PadSamples()([(torch.arange(2), 7), (torch.arange(3), 8)])
    assert pair[0].lengths.tolist() == [2, 3] and pair[1].tolist() == [7, 8]
    assert PadSamples()([torch.arange(2), torch.arange(1)]).values.tolist() == [[0, 1], [0, 0]]
