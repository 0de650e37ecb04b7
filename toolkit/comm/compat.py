"""Names of torch that differ between the versions that we run on, and the few that are private.

torch 2.13 renames two collectives and warns at every use of the old names; torch 2.11 knows only the old ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def _first_of(*names: str) -> Callable[..., Any]:
    found: Callable[..., Any] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


all_gather_single = _first_of("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _first_of("reduce_scatter_single", "reduce_scatter_tensor")


def world_store() -> dist.Store:
    """A connection of its own to the store through which the default process group met.

    `Store.clone` is public since torch 2.8, but stands in no stub.
    """
    store: dist.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def count_groups() -> int:
    """How many process groups this rank knows: torch names a group that only its members make by this number."""
    return len(distributed_c10d._world.pg_names)
