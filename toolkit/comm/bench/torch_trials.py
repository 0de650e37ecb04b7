"""The communicator's collectives, over the backend of torch that carries the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from toolkit.comm.bench.meaning import Meaning
from toolkit.comm.bench.trial import Room, Trial
from toolkit.comm.communicator import Communicator
from toolkit.comm.peers import Peers

# How the communicator does each operation that it does in one way only.
OWN_WAYS = {
    "all_gather": "flat", "reduce_scatter": "direct", "all_to_all": "flat", "broadcast": "tree", "reduce": "tree",
    "send_recv": "exchange",
}  # fmt: skip
Halves = tuple[Trial | None, Trial | None]  # out of place, in place


def torch_trials(communicator: Communicator, meaning: Meaning, algorithm: str, room: Room) -> Halves:
    """The ways to call an operation.

    torch has no all-reduce and no broadcast out of place: there the tensor, of a broadcast the root's, is copied
    first, and the copy is counted.
    """
    elements = meaning.elements
    handed = meaning.part if meaning.operation == "all_gather" else elements

    def sent(turn: int) -> torch.Tensor:
        return room.sent(handed, turn)

    def trial(call: Callable[[int], torch.Tensor | None]) -> Trial:
        return Trial(call, sent, meaning.handed_in, meaning.expected)

    def copied(turn: int, *, here: bool = True) -> torch.Tensor:
        received = room.received(elements, turn)
        return received.copy_(sent(turn)) if here else received

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        return communicator.all_reduce(tensor, "sum", algorithm)

    if meaning.operation == "all_reduce":
        return trial(lambda turn: all_reduce(copied(turn))), trial(lambda turn: all_reduce(sent(turn)))
    if meaning.operation == "broadcast":
        at_root = meaning.rank == 0
        return (
            trial(lambda turn: communicator.broadcast(copied(turn, here=at_root), 0)),
            trial(lambda turn: communicator.broadcast(sent(turn), 0)),
        )
    if meaning.operation == "send_recv":
        return trial(_exchange(meaning, sent, room)), None
    calls: dict[str, Callable[[int], torch.Tensor | None]] = {
        "all_gather": lambda turn: communicator.all_gather(sent(turn)),
        "reduce_scatter": lambda turn: communicator.reduce_scatter(sent(turn)),
        "all_to_all": lambda turn: communicator.all_to_all(sent(turn)),
        "reduce": lambda turn: communicator.reduce(sent(turn), 0),
    }
    return trial(calls[meaning.operation]), None


def _exchange(meaning: Meaning, sent: Callable[[int], torch.Tensor], room: Room) -> Callable[[int], torch.Tensor]:
    """Both messages at once, as in a round of a ring."""
    peers = Peers(dist.group.WORLD, tuple(range(meaning.ranks)), meaning.rank)
    following, before = (meaning.rank + 1) % meaning.ranks, (meaning.rank - 1) % meaning.ranks

    def call(turn: int) -> torch.Tensor:
        received = room.received(meaning.elements, turn)
        peers.exchange([(sent(turn), following)], [(received, before)])
        return received

    return call
