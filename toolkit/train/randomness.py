"""Random streams of the ranks: seeding, saving, restoring.

Every rank draws its dropout from its own stream, so the streams are part of a checkpoint, one entry a rank.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Start this rank's torch streams (CPU and GPU) at a place that depends on all three numbers."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def streams(device: str) -> dict[str, Tensor]:
    """Where this rank's torch streams stand, as uint8 tensors on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_streams(states: dict[str, Tensor], device: str) -> None:
    """Go on from `streams()` of an earlier life."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
