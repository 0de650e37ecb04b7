"""Collective operations on Python objects, after which all ranks have the same result or raise the same error."""

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

__all__ = ["Ranks", "RanksLostError", "from_rank_zero"]

T = TypeVar("T")
_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe|socket closed", re.IGNORECASE)
_PLACE = re.compile(r"^\[\S+:\d+\] ")  # the prefix of gloo's messages: file and line of its source


@contextmanager
def _detecting_lost_ranks() -> Iterator[None]:
    """Convert the RuntimeError with which gloo reports a lost connection to a `RanksLostError`.

    Raises:
        RanksLostError: a rank has exited; the error contains gloo's message.
    """
    try:
        yield
    except RuntimeError as error:
        reason = _PLACE.sub("", str(error)).partition(". ")[0]  # without gloo's general advice
        if not _GONE.search(reason):  # for example a timeout, after which a late rank may still be running
            raise
        raise RanksLostError(
            f"lost the connection to a rank ({reason})", fix="run `toolkit explain RUN` for the cause"
        ) from error


class RanksLostError(OwnFailureError):
    """Another rank exited during a collective. The ranks cannot agree on this error, so each has its own message."""


class Ranks:
    """Collectives between all ranks of a world.

    `node` is the number of this rank's node, from 0 to `nodes` - 1. `sharing_cpus` counts the ranks of this node,
    including this one, that may run on this rank's CPUs. With more than one rank, torch's default process group must be
    initialized; the constructor is collective. A separate group keeps the collectives of background saves apart from
    those of training.
    """

    def __init__(self, world: World) -> None:
        known = dist.get_world_size() if dist.is_initialized() else 1
        if known != world.size:
            raise OwnFailureError(
                f"the world has {world.size} ranks, but the default process group has {known}",
                fix="initialise the default process group first",
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
        """The number of ranks on this rank's node."""
        return dist.get_world_size(self._node) if self._node is not None else 1

    @property
    def place_on_node(self) -> int:
        """This rank's index among the ranks of its node, from 0."""
        return dist.get_rank(self._node) if self._node is not None else 0

    def from_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank.

        Raises:
            ToolkitError, OSError: the error of rank 0, on every rank.
        """
        return _from_rank_zero(self.rank, self.size, work, self._group)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's result.

        Raises:
            RankFailure: `work` failed on a rank; every rank raises `RankFailure.worst` of all failures.
        """
        return self.together_any(lambda: (work(), False))[0]

    @_detecting_lost_ranks()
    def together_any(self, work: Callable[[], tuple[T, bool]]) -> tuple[T, bool]:
        """Like `together`, for work that also returns a flag; return whether the flag is true on any rank."""
        result, failure = _attempt(self.rank, work)
        if self.size > 1:
            flags = torch.tensor([failure is not None, result is not None and result[1]], dtype=torch.uint8)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
            if flags[0]:
                raise self._agreed_failure(failure)
            assert result is not None
            return result[0], bool(flags[1])
        if failure is not None:
            raise failure
        assert result is not None
        return result

    def together_on_node(self, work: Callable[[], T]) -> list[T]:
        """Like `together`, but return the results of all ranks of this node, in rank order."""
        if self.nodes > 1 or self.size == 1:
            return self.exchange_on_node(self.together(work))
        result, failure = _attempt(self.rank, work)  # on a single node, one exchange is enough for both
        answers = self.exchange_on_node((result, failure and failure.to_json()))
        if failures := [RankFailure.from_json(failed) for _, failed in answers if failed is not None]:
            raise RankFailure.worst(failures)
        return [result for result, _ in answers]

    @_detecting_lost_ranks()
    def collect(self, work: Callable[[], bytes], size_bytes: int, finish: Callable[[list[bytes]], None]) -> None:
        """Run `work` on every rank, and `finish` on rank 0 with the results, of `size_bytes` each.

        Raises:
            RankFailure: as in `together`, or that of rank 0 if `finish` failed.
        """
        payload, failure = _attempt(self.rank, work)
        payloads = self._gather((b"\1" + payload) if payload is not None else bytes(1 + size_bytes))
        is_good = all(part[0] for part in payloads)
        if self.rank == 0 and is_good:
            _, failure = _attempt(0, lambda: finish([part[1:] for part in payloads]))
            is_good = failure is None
        if self.size > 1:
            verdict = torch.tensor([is_good], dtype=torch.uint8)
            dist.broadcast(verdict, src=0, group=self._group)
            if not verdict[0]:
                raise self._agreed_failure(failure)
        elif failure is not None:
            raise failure

    @_detecting_lost_ranks()
    def _gather(self, payload: bytes) -> list[bytes]:
        """Return the equally long payloads of all ranks on rank 0, and an empty list on the others."""
        if self.size == 1:
            return [payload]
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        received = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own, received, dst=0, group=self._group)
        return [bytes(tensor.numpy()) for tensor in received or []]

    @_detecting_lost_ranks()
    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    @_detecting_lost_ranks()
    def gather_everywhere(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    @_detecting_lost_ranks()
    def scatter_objects(self, values: list[Any]) -> Any:
        """Return this rank's item of the list that rank 0 passes."""
        if self.size == 1:
            return values[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, values if self.rank == 0 else None, src=0, group=self._group)
        return own[0]

    @_detecting_lost_ranks()
    def exchange_on_node(self, value: Any) -> list[Any]:
        """Return the values of all ranks of this node, in rank order, on each of these ranks."""
        if self.on_node == 1:
            return [value]
        values: list[Any] = [None] * self.on_node
        dist.all_gather_object(values, value, group=self._node)
        return values

    def _agreed_failure(self, own: RankFailure | None) -> RankFailure:
        failures = self.gather_everywhere(own.to_json() if own else None)
        return RankFailure.worst([RankFailure.from_json(failure) for failure in failures if failure is not None])


def from_rank_zero(world: World, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank, like `Ranks.from_rank_zero`, in the default group."""
    return _from_rank_zero(world.rank, world.size, work, None)


def _from_rank_zero(rank: int, size: int, work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    if size == 1:
        return work()
    answer: list[Any] = [None, None]
    if rank == 0:
        # Any error of rank 0 must reach the other ranks, which wait for the result.
        try:
            answer[0] = work()
        except Exception as error:  # noqa: BLE001
            answer[1] = error
    with _detecting_lost_ranks():
        # This unpickles objects, but only from ranks of the same job.
        dist.broadcast_object_list(answer, src=0, group=group)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def _attempt(rank: int, work: Callable[[], T]) -> tuple[T | None, RankFailure | None]:
    # Any error of a rank must reach the other ranks, which would wait for it.
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001
        return None, RankFailure.of(rank, error)


def _node_group(ranks: list[int]) -> dist.ProcessGroup | None:
    """Return a process group of these ranks of a node; None for a single rank."""
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True) if len(ranks) > 1 else None
