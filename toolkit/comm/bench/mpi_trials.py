"""MPI collectives on the same buffers, through mpi4py, to compare the site's MPI on the same links."""

from collections.abc import Callable
from typing import Any

import torch

from toolkit.comm.bench.trial import CollectiveCase, Room, Trial
from toolkit.world.facts import World


def mpi_library(world: World) -> tuple[str | None, str]:
    """Return (name and version of the MPI library, the reason if there is none)."""
    if not world.discovered_by.startswith("MPI"):
        return None, (
            f"mpi: {world.launcher} started the ranks, and {world.discovered_by} numbered them, without MPI; "
            "start them with mpirun, or with srun --mpi"
        )
    from mpi4py import MPI

    words = MPI.Get_library_version().split("\n")[0].split(",")[0].replace("\0", "").split()
    return " ".join(words)[:60], ""


def mpi_trials(case: CollectiveCase, room: Room) -> tuple[Trial, Trial]:
    """Return the trials of the operation in host memory, out of place and in place."""
    from mpi4py import MPI

    return _out_of_place(MPI.COMM_WORLD, case, room), _in_place(MPI.COMM_WORLD, MPI.IN_PLACE, case, room)


def _out_of_place(ranks: Any, case: CollectiveCase, room: Room) -> Trial:
    following, previous = case.neighbours
    is_root = case.rank == 0
    input_length = case.part if case.operation == "all_gather" else case.elements
    output_length = case.part if case.operation == "reduce_scatter" else case.elements

    def broadcast(one: Any, other: Any) -> None:
        if is_root:
            other[:] = one
        ranks.Bcast(other, root=0)

    calls: dict[str, Callable[[Any, Any], object]] = {
        "all_reduce": lambda one, other: ranks.Allreduce(one, other),
        "all_gather": lambda one, other: ranks.Allgather(one, other),
        "reduce_scatter": lambda one, other: ranks.Reduce_scatter_block(one, other),
        "all_to_all": lambda one, other: ranks.Alltoall(one, other),
        "broadcast": broadcast,
        "reduce": lambda one, other: ranks.Reduce(one, other if is_root else None, root=0),
        "send_recv": lambda one, other: ranks.Sendrecv(one, following, recvbuf=other, source=previous),
    }
    run = calls[case.operation]

    def call(turn: int) -> torch.Tensor:
        received = room.received(output_length, turn)
        run(room.sent(input_length, turn).numpy(), received.numpy())
        return received

    return Trial(call, lambda turn: room.sent(input_length, turn), case)


def _in_place(ranks: Any, here: Any, case: CollectiveCase, room: Room) -> Trial:
    """Return the in-place trial; all-gather and reduce-scatter use this rank's part of the whole buffer."""
    following, previous = case.neighbours
    is_root = case.rank == 0
    calls: dict[str, Callable[[Any], object]] = {
        "all_reduce": lambda data: ranks.Allreduce(here, data),
        "all_gather": lambda data: ranks.Allgather(here, data),
        "reduce_scatter": lambda data: ranks.Reduce_scatter_block(here, data),
        "all_to_all": lambda data: ranks.Alltoall(here, data),
        "broadcast": lambda data: ranks.Bcast(data, root=0),
        "reduce": lambda data: ranks.Reduce(here if is_root else data, data if is_root else None, root=0),
        "send_recv": lambda data: ranks.Sendrecv_replace(data, following, source=previous),
    }
    run = calls[case.operation]

    def sent(turn: int) -> torch.Tensor:
        data = room.sent(case.elements, turn)
        return data[case.rank * case.part :][: case.part] if case.operation == "all_gather" else data

    def call(turn: int) -> torch.Tensor:
        data = room.sent(case.elements, turn)
        run(data.numpy())
        return data[: case.part] if case.operation == "reduce_scatter" else data

    return Trial(call, sent, case)
