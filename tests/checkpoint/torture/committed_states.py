"""States that no two saves share a bit pattern of, so that what was loaded tells which save it came from.

The content of every tensor follows from the step and from the attempt that saved it. A load that mixes two saves, of
tensors or of tensors and JSON, has no name here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint import Checkpointer
from toolkit.world.facts import World

Name = tuple[int, int]  # of a state: its step, and the attempt that saved it
SHAPES = {
    "matrix": ((190, 110), torch.float32),
    "half": ((70, 33), torch.bfloat16),
    "counts": ((9,), torch.int64),
    "flags": ((1, 77), torch.bool),
    "scalar": ((), torch.float64),
    "empty": ((0, 4), torch.float32),
}
ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")


def alone(attempt: int) -> World:
    return replace(ALONE, attempt=attempt)


def tensors_of(name: Name, ranks: list[int], *, large: bool = False) -> dict[str, Any]:
    """What `ranks` hold of a state: the same tensors on all, and some of each rank's own; `large` is of 12 MiB more."""
    own = {f"rank-{rank:05d}": _filled(name, 100 + rank, (5000,), torch.float32) for rank in ranks}
    shared = {key: _filled(name, place, *SHAPES[key]) for place, key in enumerate(SHAPES)}
    if large:
        shared["large"] = torch.arange(3 << 20, dtype=torch.int32) * (2 * (name[0] * 64 + name[1]) + 1001)
    return {"model": shared, "own": own, "learning_rate": name[0] + name[1] / 16}


def blank(ranks: list[int], *, large: bool = False) -> dict[str, Any]:
    """As `tensors_of`, of no state."""
    return tensors_of((-1, -1), ranks, large=large)


def json_of(name: Name) -> dict[str, Any]:
    return {"step": name[0], "attempt": name[1], "history": [(step, name[1]) for step in range(name[0])]}


def _filled(name: Name, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed((name[0] * 64 + name[1]) * 1024 + place + 1_000_000)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype) + torch.zeros((), dtype=dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True where two nested dicts hold the same keys, types, shapes and bits."""
    if one.keys() != other.keys():
        return False
    for key, value in one.items():
        there = other[key]
        if isinstance(value, dict):
            equal = same_bits(value, there)
        elif isinstance(value, torch.Tensor):
            equal = (value.dtype, value.shape) == (there.dtype, there.shape) and torch.equal(_bits(value), _bits(there))
        else:
            equal = value == there
        if not equal:
            return False
    return True


def load_name(directory: Path, ranks: list[int], attempt: int, *, large: bool = False) -> Name | None:
    """Begin `attempt`, load the newest good checkpoint, and say which save it is, bit by bit.

    Raises:
        AssertionError: what was loaded is not the state of one save.
    """
    wanted = blank(ranks, large=large)
    loaded = Checkpointer(directory, alone(attempt)).load(wanted)
    if loaded is None:
        assert same_bits(wanted, blank(ranks, large=large))
        return None
    name = (loaded.state["step"], loaded.state["attempt"])
    assert loaded.step == name[0] and loaded.state == json_of(name), f"the JSON of step {loaded.step} is of {name}"
    assert same_bits(wanted, tensors_of(name, ranks, large=large)), (
        f"the tensors of step {loaded.step} are not those of {name}"
    )
    return name
