"""The collectives of one group of ranks: numbers and counts each operation, and reports the missing ranks on failure."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from toolkit.comm.algorithms import available
from toolkit.comm.asynchronous import AsynchronousCollectives
from toolkit.comm.compat import count_groups, world_store
from toolkit.comm.cost.choice import Choice, choose
from toolkit.comm.cost.measurement import BUDGET_S
from toolkit.comm.counters import Counters
from toolkit.comm.failures import Ticket, is_transport_error
from toolkit.comm.hierarchical import HierarchicalReducer
from toolkit.comm.issuer import Issuer
from toolkit.comm.peers import Peers
from toolkit.comm.presence import BEAT_S, Presence, new_board
from toolkit.config.gradient_compression import GradientCompressionTable
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.topology.facts import Topology
from toolkit.topology.groups import RankGroups, plan_groups
from toolkit.world.facts import World

__all__ = ["Communicator"]

TIMEOUT_S = 600.0


class Communicator:
    """Collectives over the ranks of one group.

    All ranks make the same calls in the same order. `start` has the same methods, which return a `Handle` without waiting:
    `communicator.start.all_reduce(tensor).wait()`. Roots and peers are ranks of the group. Tensors may have any
    strides and any number of elements, including zero. Any type can be moved; `check_reducible` decides what can be reduced.

    A collective that does not finish within `timeout_s` raises a CollectiveError, which names the missing ranks. The
    communicator cannot be used after that.
    """

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup | None = None,
        *,
        topology: Topology | None = None,
        counters: Counters | None = None,
        timeout_s: float = TIMEOUT_S,
        beat_s: float = BEAT_S,
    ) -> None:
        """Create separate process groups for the ranks of `group` (None: all). Collective over these ranks.

        Args:
            topology: the hosts of the ranks, from `gather_topology`; the leader and hierarchical all-reduce require it.
            beat_s: seconds between two heartbeats of a rank.

        Raises:
            CollectiveError: a rank did not join within `timeout_s`.
        """
        self.counters = counters or Counters()
        self.timeout_s = timeout_s
        self._world = world
        if world.size > 1 and not dist.is_initialized():
            raise OwnFailureError(
                f"torch's default process group is not initialised for {world.size} ranks",
                fix="start through `toolkit run`, or call toolkit.world.rendezvous.start_groups(world) first",
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if dist.is_initialized() else [0]
        if world.rank not in ranks:
            raise ToolkitError(
                f"rank {world.rank} is not in the group of ranks {ranks}",
                fix="create the communicator only on the ranks of the group",
            )
        self.rank = ranks.index(world.rank)
        self.size = len(ranks)
        presence = self._presence(ranks, beat_s) if self.size > 1 else None
        where = f"rank {world.rank} on {world.host}"
        hosts = topology.ranks_by_host.items() if topology is not None else ()
        self._host_of = {ranks.index(rank): host for host, there in hosts for rank in there if rank in ranks}
        self._issuer = Issuer(ranks, where, presence, self.counters, timeout_s)
        self._peers = self._join(ranks, topology)
        self.start = AsynchronousCollectives(self._peers, self._issuer, self._backend)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The names of the all-reduce algorithms that this layout of ranks allows."""
        return available(self._peers)

    @property
    def peers(self) -> Peers:
        """The ranks of the group and their nodes, for measurements of the links between them."""
        return self._peers

    @property
    def can_measure(self) -> bool:
        """Whether `choose_by_measurement` can run: two or more CPU ranks whose nodes are known."""
        return self.size > 1 and bool(self._peers.nodes) and self._world.device == "cpu"

    def choose_by_measurement(self, budget_s: float = BUDGET_S) -> Choice:
        """Measure the links between the ranks, for the selection by `algorithm="fastest"`. Collective.

        In a run, toolkit stores the result in the run directory; later attempts on the same nodes reuse it.

        Args:
            budget_s: seconds per tier; the tiers are the links within nodes and the network between them.

        Raises:
            ToolkitError: the nodes of the ranks are unknown, there is only one rank, or the ranks use GPUs.
        """
        if not self.can_measure:
            raise ToolkitError(
                "measuring links requires two or more CPU ranks with known nodes",
                fix="pass topology=gather_topology(world); on GPUs NCCL measures by itself",
            )
        run = RunDirectory(self._world.run_dir) if self._world.run_dir and self.size == self._world.size else None
        hosts = [self._host_of[node[0]] for node in self._peers.nodes]
        choice = choose(self._peers, hosts, self.algorithms, self._sum, run, budget_s)
        self.start.choice = choice
        return choice

    def _sum(self, tensor: torch.Tensor, algorithm: str) -> None:
        self.all_reduce(tensor, algorithm=algorithm)

    @property
    def sent_bytes(self) -> dict[int, int]:
        """The bytes that this rank sent to each rank of the group, not counting collectives of the backend ("flat")."""
        return dict(self._peers.sent_bytes)

    def close(self) -> None:
        """Stop the threads and the heartbeat. torch closes the process groups."""
        self._issuer.close()
        if self._peers.reducer is not None:
            self._peers.reducer.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        algorithm: str = "flat",
        compression: str | GradientCompressionTable | None = None,
    ) -> torch.Tensor:
        """Reduce `tensor` in place over all ranks and return it; all ranks get bitwise the same result.

        Args:
            op: "sum", "avg", "min", "max" or "product". A NaN on any rank gives NaN. 8 and 16 bit integers never
                wrap: an overflow raises an error on every rank and leaves the tensor unchanged.
            algorithm: one of `self.algorithms`, or "fastest" after `choose_by_measurement`.
            compression: an algorithm of `[gradient_compression]`, such as "int8", or a table of its keys, without error
                feedback; for sums and averages of floats, whose result is then an approximation.

        Raises:
            ToolkitError: the type does not support the op, the layout does not allow the algorithm, or the result overflows.
        """
        return self.start.all_reduce(tensor, op, algorithm, compression).wait()

    def all_reduce_many(
        self, tensors: Sequence[torch.Tensor], op: str = "sum", algorithm: str = "flat", bucket_bytes: int | None = None
    ) -> None:
        """All-reduce many tensors in place: concatenated in one call per dtype, or in buckets of `bucket_bytes`.

        Buckets are filled from the last tensor to the first, the order in which a backward pass computes gradients.
        """
        buckets = self.start.buckets(op, algorithm, bucket_bytes)
        for tensor in reversed(tensors):
            buckets.put(tensor)
        buckets.finish()

    def reduce_scatter(
        self, tensor: torch.Tensor, op: str = "sum", lengths: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Reduce over all ranks and return this rank's part along dimension 0.

        Parts are equal, or have these `lengths`, the same on all ranks; zero is allowed.
        """
        return self.start.reduce_scatter(tensor, op, lengths).wait()

    def reduce(self, tensor: torch.Tensor, root: int, op: str = "sum") -> torch.Tensor | None:
        """Reduce over all ranks and return the result on the root, None elsewhere; `tensor` is unchanged."""
        return self.start.reduce(tensor, root, op).wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors of all ranks, equal in shape, along dimension 0; scalars become a vector."""
        return self.start.all_gather(tensor).wait()

    def all_gather_unequal(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks; their first dimension may differ."""
        return self.start.all_gather_unequal(tensor).wait()

    def gather(self, tensor: torch.Tensor, root: int) -> list[torch.Tensor] | None:
        """Return the tensors of all ranks on the root, None elsewhere; their first dimension may differ."""
        return self.start.gather(tensor, root).wait()

    def scatter(self, tensors: Sequence[torch.Tensor] | None, like: torch.Tensor, root: int) -> torch.Tensor:
        """Return this rank's item of the root's `tensors`, which all have the shape and dtype of `like`."""
        return self.start.scatter(tensors, like, root).wait()

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send the i-th of equal parts along dimension 0 to rank i, and concatenate the received parts in rank order."""
        return self.start.all_to_all(tensor).wait()

    def all_to_all_unequal(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Send parts of these lengths along dimension 0 to the ranks, and return the part received from each rank."""
        return self.start.all_to_all_unequal(tensor, lengths).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Copy the root's tensor to all ranks, in place, and return it."""
        return self.start.broadcast(tensor, root).wait()

    def broadcast_many(self, tensors: Sequence[torch.Tensor], roots: Sequence[int]) -> list[torch.Tensor]:
        """Copy each tensor from its own root to all ranks concurrently, in place."""
        return self.start.broadcast_many(tensors, roots).wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to one rank; return when the caller may change the data."""
        self.start.send(tensor, to).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into `tensor`, which must have the sender's shape and type, and return it."""
        return self.start.receive(tensor, source).wait()

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has entered the barrier.

        Raises:
            CollectiveError: some ranks did not enter within `timeout_s` (None: the communicator's); the error names them.
        """
        self.start.barrier().wait(timeout_s)

    def _presence(self, ranks: Sequence[int], beat_s: float) -> Presence:
        board = new_board(f"communicator/{zlib.crc32(repr(ranks).encode())}", self._world.rank)
        return Presence(board, self.rank, self.size, beat_s=beat_s)

    def _join(self, ranks: list[int], topology: Topology | None) -> Peers:
        """Create the process groups; a failure names the missing ranks."""
        members = tuple(range(self.size))
        if self.size == 1:
            return Peers(None, members, 0)
        nodes = _nodes(ranks, topology)
        start = time.monotonic()
        try:
            group = self._own_group(ranks)
            reducer = None
            if topology is not None and self.size == self._world.size and (plan := plan_groups(topology)).hierarchical:
                reducer = HierarchicalReducer(plan, self.counters, timeout_s=self.timeout_s)
            peers = Peers(group, members, self.rank, nodes, reducer)
            if self._world.device.startswith("cuda"):
                # NCCL requires a collective of all ranks before two of them may communicate alone.
                dist.all_reduce(torch.zeros(1, device=self._world.device), group=group)
        except RuntimeError as error:
            if not is_transport_error(error):
                raise
            raise self._issuer.explained(Ticket("making the communicator", 0), time.monotonic() - start) from error
        return peers

    def _own_group(self, ranks: list[int]) -> dist.ProcessGroup:
        timeout = timedelta(seconds=self.timeout_s)
        if len(ranks) == dist.get_world_size():
            group: dist.ProcessGroup = dist.new_group(timeout=timeout)
            return group
        # torch derives the name of such a group from the rank's number of groups. If the numbers differ, the ranks
        # never connect.
        store = dist.PrefixStore("communicator/groups", world_store())
        key = f"{zlib.crc32(repr(ranks).encode())}/{store.add(f'{ranks}/{self._world.rank}', 1)}"
        store.set(f"{key}/{self._world.rank}", str(count_groups()))
        store.set_timeout(timeout)
        counts = {rank: int(store.get(f"{key}/{rank}")) for rank in ranks}
        if len(set(counts.values())) > 1:
            raise ToolkitError(
                "expected equal numbers of process groups, but "
                + ", ".join(f"rank {rank} has {count}" for rank, count in counts.items()),
                where=f"rank {self._world.rank} on {self._world.host}",
                fix="create process groups and communicators of subsets on all ranks, so that each rank has the same number",
            )
        own: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        return own

    def _backend(self, device: torch.device) -> str:
        if self._peers.group is None:
            return "one rank"
        names = dist.get_backend_config(self._peers.group)
        return dict(pair.split(":") for pair in names.split(",")).get(device.type, names)


def _nodes(ranks: Sequence[int], topology: Topology | None) -> RankGroups:
    """Return the group ranks on each node; empty if the node of any rank is unknown."""
    if topology is None or topology.conflicts:
        return ()
    places = {rank: place for place, rank in enumerate(ranks)}
    nodes = [tuple(places[rank] for rank in on_host if rank in places) for on_host in topology.ranks_by_host.values()]
    return tuple(node for node in nodes if node) if sum(map(len, nodes)) == len(ranks) else ()
