"""MPI's own collectives on the same memory, through mpi4py: what the site's MPI makes of the same links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toolkit.comm.bench.meaning import Meaning
from toolkit.comm.bench.trial import Room, Trial
from toolkit.world.facts import World


def mpi_library(world: World) -> tuple[str | None, str]:
    """(the library's name and version, why there is none)."""
    if not world.discovered_by.startswith("MPI"):
        return None, (
            f"mpi: the ranks were started by {world.launcher} and found by {world.discovered_by}, without MPI; "
            "start them with mpirun, or with srun --mpi"
        )
    from mpi4py import MPI

    words = MPI.Get_library_version().split("\n")[0].split(",")[0].replace("\0", "").split()
    return " ".join(words)[:60], ""


def mpi_trials(meaning: Meaning, room: Room) -> tuple[Trial, Trial]:
    """The operation out of place and in place, on the host's memory."""
    from mpi4py import MPI

    return _out_of_place(MPI, meaning, room), _in_place(MPI, meaning, room)


def _out_of_place(library: Any, meaning: Meaning, room: Room) -> Trial:
    ranks: Any = library.COMM_WORLD
    rank, following, before = _neighbours(meaning)
    handed = meaning.part if meaning.operation == "all_gather" else meaning.elements
    length = meaning.part if meaning.operation == "reduce_scatter" else meaning.elements

    def broadcast(one: Any, other: Any) -> None:
        if rank == 0:
            other[:] = one
        ranks.Bcast(other, root=0)

    calls: dict[str, Callable[[Any, Any], object]] = {
        "all_reduce": lambda one, other: ranks.Allreduce(one, other),
        "all_gather": lambda one, other: ranks.Allgather(one, other),
        "reduce_scatter": lambda one, other: ranks.Reduce_scatter_block(one, other),
        "all_to_all": lambda one, other: ranks.Alltoall(one, other),
        "broadcast": broadcast,
        "reduce": lambda one, other: ranks.Reduce(one, other if rank == 0 else None, root=0),
        "send_recv": lambda one, other: ranks.Sendrecv(one, following, recvbuf=other, source=before),
    }
    run = calls[meaning.operation]

    def call(turn: int) -> torch.Tensor:
        received = room.received(length, turn)
        run(room.sent(handed, turn).numpy(), received.numpy())
        return received

    return Trial(call, lambda turn: room.sent(handed, turn), meaning.handed_in, meaning.expected)


def _in_place(library: Any, meaning: Meaning, room: Room) -> Trial:
    """All-gather and reduce-scatter in place work on a part of the buffer that has all data."""
    ranks: Any = library.COMM_WORLD
    here = library.IN_PLACE
    rank, following, before = _neighbours(meaning)
    calls: dict[str, Callable[[Any], object]] = {
        "all_reduce": lambda data: ranks.Allreduce(here, data),
        "all_gather": lambda data: ranks.Allgather(here, data),
        "reduce_scatter": lambda data: ranks.Reduce_scatter_block(here, data),
        "all_to_all": lambda data: ranks.Alltoall(here, data),
        "broadcast": lambda data: ranks.Bcast(data, root=0),
        "reduce": lambda data: ranks.Reduce(here if rank == 0 else data, data if rank == 0 else None, root=0),
        "send_recv": lambda data: ranks.Sendrecv_replace(data, following, source=before),
    }
    run = calls[meaning.operation]

    def sent(turn: int) -> torch.Tensor:
        data = room.sent(meaning.elements, turn)
        return data[rank * meaning.part :][: meaning.part] if meaning.operation == "all_gather" else data

    def call(turn: int) -> torch.Tensor:
        data = room.sent(meaning.elements, turn)
        run(data.numpy())
        return data[: meaning.part] if meaning.operation == "reduce_scatter" else data

    return Trial(call, sent, meaning.handed_in, meaning.expected)


def _neighbours(meaning: Meaning) -> tuple[int, int, int]:
    """(this rank, the next, the one before)."""
    return meaning.rank, (meaning.rank + 1) % meaning.ranks, (meaning.rank - 1) % meaning.ranks
