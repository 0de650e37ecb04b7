"""Names of torch that differ between the versions that we run on, and the few that are private.

torch 2.13 renames two collectives and warns at every use of the old names; torch 2.11 knows only the old ones.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def _first_of(*names: str) -> Callable[..., Any]:
    found: Callable[..., Any] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


all_gather_single = _first_of("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _first_of("reduce_scatter_single", "reduce_scatter_tensor")


def world_store() -> dist.Store:
    """A connection of its own to the store through which the default process group met.

    `Store.clone` is public since torch 2.8, but is in no type stub.
    """
    store: dist.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def world_timeout() -> timedelta:
    """How long the default process group waits; other groups would get torch's own half an hour."""
    timeout: timedelta = distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    return timeout


def count_groups() -> int:
    """How many process groups this rank knows: torch names a group that only its members make by this number."""
    return len(distributed_c10d._world.pg_names)


def after_backward(check: Callable[[], None]) -> None:
    """Call `check` when the backward pass that runs now is over, before `backward` returns; what it raises is raised there.

    DDP ends its pass in such a callback, too, which it has not asked for yet: the one that is asked for from within
    a callback comes behind it. FSDP2 and DDP's own hooks use the same private name.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(check))


def when_computed(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that runs now has computed its last gradient, before it waits for others.

    DDP and FSDP2 wait in their own callbacks, which they register later than a caller of this in the hook of the
    loss, with which a backward pass begins.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
