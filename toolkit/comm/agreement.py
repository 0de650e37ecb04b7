"""What ranks must agree on while they save and load: one answer, and one error, for all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from toolkit.comm.rank_failure import RankFailure
from toolkit.errors import OwnFailureError
from toolkit.world.facts import World

T = TypeVar("T")
_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe|socket closed", re.IGNORECASE)
_PLACE = re.compile(r"^\[\S+:\d+\] ")  # in gloo's source


@contextmanager
def _hearing_of_the_lost() -> Iterator[None]:
    """gloo tells of a lost connection by a RuntimeError like any other; what it says stays in the message and the chain.

    Raises:
        RanksLostError: a rank has ended.
    """
    try:
        yield
    except RuntimeError as error:
        said = _PLACE.sub("", str(error)).partition(". ")[0]  # behind it stands general advice
        if not _GONE.search(said):  # ranks that are only late are another matter
            raise
        raise RanksLostError(f"a rank went away ({said})", fix="`toolkit explain RUN` says how it ended") from error


class RanksLostError(OwnFailureError):
    """Another rank has ended in the middle of an exchange. Nobody could agree on this: each rank hears its own words."""


class Ranks:
    """The ranks that save and load together. `node` is this rank's of `nodes` nodes, numbered without gaps;
    `sharing_cpus` counts the ranks of it, this one among them, that may run on CPUs of this rank's.

    With more than one, torch's default process group must be initialised; making this is collective. The exchanges have
    a group of their own: a save in the background must not meet the training's collectives.
    """

    def __init__(self, world: World) -> None:
        known = dist.get_world_size() if dist.is_initialized() else 1
        if known != world.size:
            raise OwnFailureError(
                f"the world has {world.size} ranks, the process group {known}",
                fix="initialise the default process group before checkpoints are used",
            )
        self.rank = world.rank
        self.size = world.size
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        nodes = self.gather_everywhere(world.node)
        self.node = sorted(set(nodes)).index(world.node)
        self.nodes = len(set(nodes))
        self._node = _node_group([rank for rank, node in enumerate(nodes) if node == world.node])
        own = os.sched_getaffinity(0)
        self.sharing_cpus = sum(bool(own & given) for given in self.exchange_on_node(own))

    @property
    def on_node(self) -> int:
        """How many of them share this rank's node."""
        return dist.get_world_size(self._node) if self._node is not None else 1

    @property
    def place_on_node(self) -> int:
        """This rank's place among those of its node, from 0."""
        return dist.get_rank(self._node) if self._node is not None else 0

    def from_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank.

        Raises:
            ToolkitError, OSError: what rank 0 raised, on every rank.
        """
        return _from_rank_zero(self.rank, self.size, work, self._group)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; this rank's result.

        Raises:
            RankFailure: on every rank, that of the lowest rank that failed, a damaged checkpoint before all else.
        """
        return self.together_any(lambda: (work(), False))[0]

    @_hearing_of_the_lost()
    def together_any(self, work: Callable[[], tuple[T, bool]]) -> tuple[T, bool]:
        """As `together`, for work that also answers a question: whether any rank says yes."""
        result, failure = _attempt(self.rank, work)
        if self.size > 1:
            signs = torch.tensor([failure is not None, result is not None and result[1]], dtype=torch.uint8)
            dist.all_reduce(signs, op=dist.ReduceOp.MAX, group=self._group)
            if signs[0]:
                raise self._agreed_failure(failure)
            assert result is not None
            return result[0], bool(signs[1])
        if failure is not None:
            raise failure
        assert result is not None
        return result

    @_hearing_of_the_lost()
    def collect(self, work: Callable[[], bytes], size_bytes: int, finish: Callable[[list[bytes]], None]) -> None:
        """Every rank works and hands `size_bytes` to rank 0, which finishes with what all handed in.

        Raises:
            RankFailure: as `together`; rank 0's where it could not finish.
        """
        payload, failure = _attempt(self.rank, work)
        found = self._gather((b"\1" + payload) if payload is not None else bytes(1 + size_bytes))
        good = all(part[0] for part in found)
        if self.rank == 0 and good:
            _, failure = _attempt(0, lambda: finish([part[1:] for part in found]))
            good = failure is None
        if self.size > 1:
            verdict = torch.tensor([good], dtype=torch.uint8)
            dist.broadcast(verdict, src=0, group=self._group)
            if not verdict[0]:
                raise self._agreed_failure(failure)
        elif failure is not None:
            raise failure

    @_hearing_of_the_lost()
    def _gather(self, payload: bytes) -> list[bytes]:
        """The payload of every rank, all of one length, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [payload]
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own, found, dst=0, group=self._group)
        return [bytes(tensor.numpy()) for tensor in found or []]

    @_hearing_of_the_lost()
    def gather_objects(self, value: Any) -> list[Any]:
        """The value of every rank on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    @_hearing_of_the_lost()
    def gather_everywhere(self, value: Any) -> list[Any]:
        """The value of every rank, on all of them."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    @_hearing_of_the_lost()
    def scatter_objects(self, values: list[Any]) -> Any:
        """Each rank's own of the values that rank 0 gives."""
        if self.size == 1:
            return values[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, values if self.rank == 0 else None, src=0, group=self._group)
        return own[0]

    @_hearing_of_the_lost()
    def exchange_on_node(self, value: Any) -> list[Any]:
        """The value of every rank of this node, on all of them, in the order of their ranks."""
        if self.on_node == 1:
            return [value]
        found: list[Any] = [None] * self.on_node
        dist.all_gather_object(found, value, group=self._node)
        return found

    def _agreed_failure(self, own: RankFailure | None) -> RankFailure:
        found = self.gather_everywhere(own.to_json() if own else None)
        return RankFailure.worst([RankFailure.from_json(text) for text in found if text is not None])


def from_rank_zero(world: World, work: Callable[[], T]) -> T:
    """`Ranks.from_rank_zero` over torch's default group."""
    return _from_rank_zero(world.rank, world.size, work, None)


def _from_rank_zero(rank: int, size: int, work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    if size == 1:
        return work()
    answer: list[Any] = [None, None]
    if rank == 0:
        # Anything that rank 0 raises must reach the others, who wait for the answer.
        try:
            answer[0] = work()
        except Exception as error:  # noqa: BLE001
            answer[1] = error
    with _hearing_of_the_lost():
        # Objects travel only between our own ranks.
        dist.broadcast_object_list(answer, src=0, group=group)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def _attempt(rank: int, work: Callable[[], T]) -> tuple[T | None, RankFailure | None]:
    # Whatever a rank raises must reach the others, who would wait for it.
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001
        return None, RankFailure.of(rank, error)


def _node_group(ranks: list[int]) -> dist.ProcessGroup | None:
    """A group of the ranks that share a node, however they were laid out; None for one that is alone there."""
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True) if len(ranks) > 1 else None
