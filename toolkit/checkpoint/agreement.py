"""One answer for all ranks: rank 0 works, everybody gets its result or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from toolkit.errors import OwnFailureError
from toolkit.world.facts import World

T = TypeVar("T")


def check_group(world: World) -> None:
    """Refuse to work as one of many when torch knows of no others."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != world.size:
        raise OwnFailureError(
            f"the world has {world.size} ranks, the process group {ranks}",
            fix="initialise the default process group before checkpoints are used",
        )


def from_rank_zero(world: World, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank.

    Raises:
        OSError, ToolkitError: what rank 0 raised, on every rank.
    """
    if world.size == 1:
        return work()
    answer: list[Any] = [None, None]
    if world.rank == 0:
        # Anything that rank 0 raises must reach the others, who wait for the answer.
        try:
            answer[0] = work()
        except Exception as error:  # noqa: BLE001
            answer[1] = error
    # Objects travel only between our own ranks.
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result
