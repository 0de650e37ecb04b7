"""The communicator's collectives, over torch's backend for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from toolkit.comm.bench.trial import CollectiveCase, Room, Trial
from toolkit.comm.communicator import Communicator
from toolkit.comm.peers import Peers

# The algorithm of each operation for which the communicator has only one.
ONLY_ALGORITHM = {
    "all_gather": "flat", "reduce_scatter": "direct", "all_to_all": "flat", "broadcast": "tree", "reduce": "tree",
    "send_recv": "exchange",
}  # fmt: skip
Halves = tuple[Trial | None, Trial | None]  # out of place, in place


def torch_trials(communicator: Communicator, case: CollectiveCase, algorithm: str, room: Room) -> Halves:
    """The operation out of place and in place.

    torch has no all-reduce and no broadcast out of place: these trials copy the tensor first (the root's in a broadcast),
    and the time includes the copy.
    """
    peers = Peers(dist.group.WORLD, tuple(range(case.ranks)), case.rank)
    input_length = case.part if case.operation == "all_gather" else case.elements

    def sent(turn: int) -> torch.Tensor:
        return room.sent(input_length, turn)

    def copied(turn: int, *, has_input: bool = True) -> torch.Tensor:
        received = room.received(case.elements, turn)
        return received.copy_(sent(turn)) if has_input else received

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        return communicator.all_reduce(tensor, "sum", algorithm)

    calls: dict[str, tuple[Callable[[int], torch.Tensor | None], Callable[[int], torch.Tensor | None] | None]] = {
        "all_reduce": (lambda turn: all_reduce(copied(turn)), lambda turn: all_reduce(sent(turn))),
        "broadcast": (
            lambda turn: communicator.broadcast(copied(turn, has_input=case.rank == 0), 0),
            lambda turn: communicator.broadcast(sent(turn), 0),
        ),
        "send_recv": (lambda turn: _exchange(peers, case, sent(turn), room.received(case.elements, turn)), None),
        "all_gather": (lambda turn: communicator.all_gather(sent(turn)), None),
        "reduce_scatter": (lambda turn: communicator.reduce_scatter(sent(turn)), None),
        "all_to_all": (lambda turn: communicator.all_to_all(sent(turn)), None),
        "reduce": (lambda turn: communicator.reduce(sent(turn), 0), None),
    }
    out_of_place, in_place = calls[case.operation]
    return Trial(out_of_place, sent, case), None if in_place is None else Trial(in_place, sent, case)


def _exchange(peers: Peers, case: CollectiveCase, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Send and receive concurrently, as in a round of a ring."""
    following, previous = case.neighbours
    peers.exchange([(sent, following)], [(received, previous)])
    return received
