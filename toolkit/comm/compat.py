"""Collectives whose names differ between the torch versions that we run on.

torch 2.13 renames these two and warns at every use of the old names; torch 2.11 knows only the old ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def _first_of(*names: str) -> Callable[..., Any]:
    found: Callable[..., Any] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


all_gather_single = _first_of("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _first_of("reduce_scatter_single", "reduce_scatter_tensor")
