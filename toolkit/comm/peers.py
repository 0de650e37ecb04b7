"""The ranks that take part in a collective, and what goes between two of them."""

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
    and empty where the nodes are unknown; `reducer` is there where their layout allows the hierarchical way.
    `sent_bytes` counts what this rank sent to each rank of the group, backends' own collectives apart. Messages of
    another `tag` do not meet. Without a group there is this rank alone.
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
        """How many ranks take part."""
        return len(self.members)

    def among(self, places: Sequence[int]) -> Peers:
        """Only those at `places`, this rank among them, in that order. They share the process group."""
        members = tuple(self.members[place] for place in places)
        return replace(self, members=members, place=list(places).index(self.place), nodes=(), reducer=None)

    def post(self, sends: Iterable[Message] = (), receives: Iterable[Message] = ()) -> list[dist.Work]:
        """Start sends and receives. The tensors must not be touched before every work has finished.

        What goes from one rank to another arrives in the order of the calls, and within a call in the order of the
        messages. Empty tensors are skipped, on both sides.
        """
        operations = [self._operation(dist.irecv, tensor, peer) for tensor, peer in receives if tensor.numel()]
        for tensor, peer in sends:
            if tensor.numel():
                operations.append(self._operation(dist.isend, tensor, peer))
                self.sent_bytes[self.members[peer]] += tensor.numel() * tensor.element_size()
        return dist.batch_isend_irecv(operations) if operations else []

    def exchange(self, sends: Iterable[Message] = (), receives: Iterable[Message] = ()) -> None:
        """Send and receive; on a GPU, what follows on the stream waits for it."""
        for work in self.post(sends, receives):
            work.wait()

    def _operation(self, way: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(way, as_bytes(tensor), group=self.group, tag=self.tag, group_peer=self.members[peer])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, shape (bytes,): every backend carries that, whatever the type. Contiguous only."""
    # One element counts as contiguous whatever its stride, which a view of another type then refuses.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
