"""The ranks that take part in a collective, and the messages between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.topology.groups import RankGroups

if TYPE_CHECKING:
    from toolkit.comm.hierarchical import HierarchicalReducer

Message = tuple[torch.Tensor, int]  # a contiguous tensor, and the place (index) of the peer


@dataclass(frozen=True)
class Peers:
    """The ranks of a process group that take part in a collective. A rank's place is its index among them, from 0.

    `members[place]` is the group rank at a place, `place` is that of this rank. `nodes` lists the places on each node,
    ascending, and is empty if the nodes are unknown; `reducer` is set if the layout allows the hierarchical algorithm.
    `sent_bytes` counts the bytes that this rank sent to each group rank, without collectives of the backend. A receive
    matches only sends with the same `tag`. `group` is None for a single rank.
    """

    group: dist.ProcessGroup | None
    members: tuple[int, ...]
    place: int
    nodes: RankGroups = ()
    reducer: HierarchicalReducer | None = None
    tag: int = 0
    sent_bytes: Counter[int] = field(default_factory=Counter, compare=False)

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return len(self.members)

    def among(self, places: Sequence[int]) -> Peers:
        """Return the peers at `places`, in that order, which include this rank. They share the process group."""
        members = tuple(self.members[place] for place in places)
        return replace(self, members=members, place=list(places).index(self.place), nodes=(), reducer=None)

    def post(self, sends: Iterable[Message] = (), receives: Iterable[Message] = ()) -> list[dist.Work]:
        """Start sends and receives. The caller must not use the tensors before every returned work has finished.

        Messages from one rank to another arrive in call order, and within a call in the order of the arguments. Empty
        tensors are neither sent nor received.
        """
        operations = [self._operation(dist.irecv, tensor, peer) for tensor, peer in receives if tensor.numel()]
        for tensor, peer in sends:
            if tensor.numel():
                operations.append(self._operation(dist.isend, tensor, peer))
                self.sent_bytes[self.members[peer]] += tensor.numel() * tensor.element_size()
        return dist.batch_isend_irecv(operations) if operations else []

    def exchange(self, sends: Iterable[Message] = (), receives: Iterable[Message] = ()) -> None:
        """Send and receive; on a GPU, only later work on the stream waits for the transfers."""
        for work in self.post(sends, receives):
            work.wait()

    def _operation(self, call: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(call, as_bytes(tensor), group=self.group, tag=self.tag, group_peer=self.members[peer])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as uint8, shape (bytes,), which every backend supports."""
    # torch treats a single element as contiguous with any stride, but `view` with another type rejects that stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
