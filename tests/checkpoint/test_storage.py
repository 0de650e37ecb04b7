"""HDF5 storage under plain dcp.save and dcp.load, in one process: every element type and shape, bit by bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.elements import ELEMENTS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf")


def save(path: Path, state: dict) -> None:
    dcp.save(state, storage_writer=HDF5StorageWriter(path))


def load(path: Path, state: dict) -> dict:
    dcp.load(state, storage_reader=HDF5StorageReader(path))
    return state


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return first.dtype == second.dtype and first.shape == second.shape and bits(first) == bits(second)


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits, so also NaNs with payloads, infinities and subnormal numbers."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    if kind is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * ELEMENTS[dtype].size_bytes
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(kind).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(ELEMENTS)),
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    seed=st.integers(0, 2**32),
    transposed=st.booleans(),
)
def test_every_element_type_comes_back_bit_by_bit(dtype, shape, seed, transposed):
    tensor = random_bits(dtype, shape, seed)
    if transposed:
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        save(path, {"x": tensor})
        loaded = load(path, {"x": torch.zeros_like(tensor)})
    assert same_bits(loaded["x"], tensor)
