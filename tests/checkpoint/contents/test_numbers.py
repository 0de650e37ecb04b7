"""Stored elements become the numbers that torch says they are, each of the small formats in full."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolkit.checkpoint.contents.stored_tensors import SMALL_FLOATS, as_numbers
from toolkit.checkpoint.format.elements import ELEMENTS


@pytest.mark.parametrize("dtype", sorted(SMALL_FLOATS))
def test_all_bytes_of_the_8_bit_floats(dtype):
    stored = np.arange(256, dtype=np.uint8)
    expected = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float32).numpy()
    found = as_numbers(dtype, stored)
    assert np.array_equal(found, expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])


def test_all_bits_of_bfloat16():
    stored = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(as_numbers("bfloat16", stored), expected, equal_nan=True)


def test_pairs_of_halves_and_truths():
    pairs = np.array([(1.5, -2.0), (0.0, np.inf)], ELEMENTS["complex32"].memory)
    assert as_numbers("complex32", pairs).tolist() == [1.5 - 2j, complex(0, np.inf)]
    assert as_numbers("bool", np.array([True, False])).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", sorted(ELEMENTS))
def test_every_type_is_a_number_for_numpy(dtype):
    assert as_numbers(dtype, np.zeros(3, ELEMENTS[dtype].memory)).dtype.kind in "fciu"
