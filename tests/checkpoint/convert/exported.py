"""What the tests of exports and imports share: checkpoints to export, tensors as bits, a disk that is soon full."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.world.facts import World

ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=0)
_WITHOUT_TORCH = """
import sys
from toolkit.cli.main import cli
cli.main(sys.argv[1:], standalone_mode=False)
assert "torch" not in sys.modules, "torch was imported"
"""


def save(folder: Path, tensors: dict[str, Any], step: int = 7) -> Path:
    """A checkpoint of one rank below `folder`."""
    return Checkpointer(folder / "checkpoints", ALONE).save(step, tensors, {"step": step})


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def any_bits(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bits, NaN among them."""
    size = ELEMENTS[dtype].size_bytes
    random = np.random.default_rng(len(dtype)).integers(0, 2 if dtype == "bool" else 256, (*shape, size), np.uint8)
    return torch.from_numpy(random.reshape(-1)).view(getattr(torch, dtype)).reshape(shape)


def every_element(dtypes: Iterable[str]) -> dict[str, torch.Tensor]:
    """A tensor of each type, and those with odd shapes and names."""
    shared = torch.arange(6.0)
    return {f"of {dtype}": any_bits(dtype, (3, 5)) for dtype in dtypes} | {
        "scalar": torch.tensor(2.5),
        "no rows": torch.empty(0, 4),
        "no columns": torch.empty(3, 0, dtype=torch.int8),
        "a/b/../c": torch.ones(2),
        "größe.层": torch.ones(3, dtype=torch.bfloat16),
        "tied.in": shared,
        "tied.out": shared,
    }


def without_torch_in_280_mb(*words: object) -> subprocess.CompletedProcess[str]:
    """`toolkit` in a process that fails when torch is imported, or when it allocates more memory.

    The limit is on private writable memory: the safetensors library maps a file read-only while it checks the header.
    """
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, *map(str, words)],
        capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (280_000_000, 280_000_000)),
    )  # fmt: skip
