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

Message = tuple[torch.Tensor, int]  # a contiguous tensor, and the place of the peer


@dataclass(frozen=True)
class Peers:
    """Some ranks of a process group, numbered by their places from 0.

    `members[place]` is a rank of the group, `place` this rank's own. `nodes` are the places on each node, ascending,
    and empty if the nodes are unknown; `reducer` is set if their layout allows the hierarchical algorithm.
    `sent_bytes` counts what this rank sent to each rank of the group, without the backends' own collectives. Messages
    match only within one `tag`. `group` is None for a single rank.
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
        """The peers at `places`, in that order, including this rank. They share the process group."""
        members = tuple(self.members[place] for place in places)
        return replace(self, members=members, place=list(places).index(self.place), nodes=(), reducer=None)

    def post(self, sends: Iterable[Message] = (), receives: Iterable[Message] = ()) -> list[dist.Work]:
        """Start sends and receives. The tensors must not be touched before every work has finished.

        Messages from one rank to another arrive in the order of the calls, and within a call in the order of the
        arguments. Empty tensors are skipped, on both sides.
        """
        operations = [self._operation(dist.irecv, tensor, peer) for tensor, peer in receives if tensor.numel()]
        for tensor, peer in sends:
            if tensor.numel():
                operations.append(self._operation(dist.isend, tensor, peer))
                self.sent_bytes[self.members[peer]] += tensor.numel() * tensor.element_size()
        return dist.batch_isend_irecv(operations) if operations else []

    def exchange(self, sends: Iterable[Message] = (), receives: Iterable[Message] = ()) -> None:
        """Send and receive; on a GPU, later work on the stream waits for it."""
        for work in self.post(sends, receives):
            work.wait()

    def _operation(self, call: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(call, as_bytes(tensor), group=self.group, tag=self.tag, group_peer=self.members[peer])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, shape (bytes,), which every backend supports. Contiguous tensors only."""
    # torch treats a single element as contiguous with any stride, but `view` with another type rejects that stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
