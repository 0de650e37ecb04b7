"""Rows of a box come out of the blocks of a file as numpy slices them out of the whole."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.checkpoint.loading import wanted as rows_module
from toolkit.checkpoint.loading.wanted import rows_of

BLOCK = 32


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    start = [draw(st.integers(0, size - 1)) for size in shape]
    extent = [draw(st.integers(1, size - at)) for at, size in zip(start, shape, strict=True)]
    return tuple(shape), tuple(start), tuple(extent)


@given(
    boxes(),
    st.integers(0, 2 * BLOCK),
    st.sampled_from(["u1", "<u2", "<u4", "<u8", "<c16"]),
    st.integers(1, 100),
    st.booleans(),
)
@settings(max_examples=300)
def test_each_row_is_copied_once_from_the_block_in_which_it_begins(box, first, dtype, most_row_bytes, contiguous):
    shape, start, extent = box
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    file = np.random.default_rng(count).integers(0, 256, first + count, dtype="u1")
    piece = np.ndarray(shape, dtype, file.tobytes(), first)
    out = np.zeros((*extent, 2), dtype)[..., 0] if not contiguous else np.zeros(extent, dtype)
    most = max(most_row_bytes, out.itemsize)
    copied = 0
    with patch.object(rows_module, "_MOST_ROW_BYTES", most):
        for rows in rows_of(first, shape, start, out):
            assert rows.span <= rows.distance <= most
            for begin in range(0, len(file), BLOCK):
                numbers = rows.starting_in(range(begin, begin + BLOCK))
                if numbers:
                    held = file[begin : begin + BLOCK + most].tobytes()
                    rows.copy(numbers, memoryview(held), begin)
                    copied += rows.out[numbers.start : numbers.stop].size
    assert copied == out.size
    expected = piece[tuple(slice(at, at + size) for at, size in zip(start, extent, strict=True))]
    assert out.tobytes() == expected.tobytes()
