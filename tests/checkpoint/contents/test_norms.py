"""Norms are those of the numbers, also where squares leave float64, and what is no number is counted apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from toolkit.checkpoint import HDF5StorageWriter
from toolkit.checkpoint.contents.norms import Magnitudes, Norms, norms_of
from toolkit.checkpoint.contents.stored_tensors import StoredTensors
from toolkit.checkpoint.format.manifest_file import read_manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TENSORS = {
    "wide": torch.arange(-700_000, 700_000, dtype=torch.float32).reshape(1000, 1400),
    "half": torch.tensor([3.0, -4.0, 0.0, float("nan"), float("-inf")], dtype=torch.bfloat16),
    "eighth": torch.tensor([240.0, -448.0, 0.0]).to(torch.float8_e4m3fn),
    "pair": torch.tensor([3 + 4j, 0j, complex(float("nan"), 1), complex(float("inf"), float("nan"))]),
    "low": torch.tensor([-(2**63), 0, 1]),
    "truth": torch.tensor([True, False, True]),
    "nothing": torch.empty(0, 3),
    "scalar": torch.tensor(-2.5),
}
EXPECTED = {
    "half": Norms(5, 5.0, 4.0, 1, 1, 1),
    "eighth": Norms(3, math.hypot(240, 448), 448.0, 1, 0, 0),
    "pair": Norms(4, 5.0, 5.0, 1, 2, 0),
    "low": Norms(3, 2.0**63, 2.0**63, 1, 0, 0),
    "truth": Norms(3, math.sqrt(2), 1.0, 1, 0, 0),
    "nothing": Norms(0, 0.0, 0.0, 0, 0, 0),
    "scalar": Norms(1, 2.5, 2.5, 0, 0, 0),
}


def test_norms_of_stored_tensors(tmp_path):
    folder = tmp_path / "step-00000001"
    dcp.save(dict(TENSORS), storage_writer=HDF5StorageWriter(folder), no_dist=True)
    told: list[int] = []
    with StoredTensors(folder, read_manifest(folder)) as stored:
        for name, expected in EXPECTED.items():
            assert norms_of(stored, name) == expected, name
        found = norms_of(stored, "wide", told.append)
    expected = math.sqrt(sum(number * number for number in range(-700_000, 700_000)))
    assert found.norm == pytest.approx(expected, rel=1e-12) and (found.largest, found.zeros) == (700_000.0, 1)
    assert sum(told) == TENSORS["wide"].numel() * 4


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_squares_that_leave_the_range(scale):
    gathered = Magnitudes()
    for part in ([3.0], [0.0, 4.0]):
        gathered.add(np.array(part) * -scale)
    assert gathered.gathered().norm == pytest.approx(5 * scale, rel=1e-12)
    assert gathered.gathered().largest == 4 * scale
