"""torch names that differ between supported versions, and the private torch API that toolkit uses.

torch 2.13 renames two collectives and warns at every use of the old names; torch 2.11 has only the old names.
"""

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
    """Return a separate connection to the store of the default process group.

    `Store.clone` is public since torch 2.8, but missing from the type stubs.
    """
    store: dist.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def world_timeout() -> timedelta:
    """Return the timeout of the default process group; for other groups, torch would use its default of 30 minutes."""
    timeout: timedelta = distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    return timeout


def count_groups() -> int:
    """Return the number of process groups of this rank; torch puts it into names of groups that only members create."""
    return len(distributed_c10d._world.pg_names)


def after_backward(check: Callable[[], None]) -> None:
    """Call `check` at the end of the current backward pass; `backward` raises its errors.

    DDP also finishes its pass in such a callback, which it registers later. Therefore this callback registers `check`
    as another callback, which runs after DDP's. FSDP2 and the hooks in DDP use the same private API.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(check))
