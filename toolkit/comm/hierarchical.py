"""All-reduce in three stages: reduce-scatter in the node, all-reduce across nodes, all-gather in the node.

With N nodes of L ranks and S bytes, 2(N-1)/N S leave each node. A flat ring needs 2(NL-1)/NL S when neighbours in
rank are neighbours on nodes, and L times as much when ranks are dealt to nodes in turn; its latency grows with NL,
here with N. The stages of different segments run at the same time, so that the network need not wait for the
node. After the 2D-torus all-reduce of Mikami et al., "Massively Distributed SGD", arXiv:1811.05233 (2018).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
import torch.distributed as dist

from toolkit.comm.compat import all_gather_single, reduce_scatter_single
from toolkit.comm.counters import Counters
from toolkit.comm.ordered_thread import OrderedThread
from toolkit.topology.groups import GroupPlan, RankGroups

NODE_REDUCE_SCATTER = "node reduce-scatter"
CROSS_ALL_REDUCE = "cross all-reduce"
NODE_ALL_GATHER = "node all-gather"
SEGMENT_BYTES = 2 * 1024 * 1024


class HierarchicalReducer:
    """This rank's groups and the all-reduce over them.

    Each stage has its own thread and its own process group, which nothing else uses. Work enters every stage in the
    order of the calls, and all ranks must make the same calls in the same order; then no rank can wait for another
    in a circle, however many reductions are under way.
    """

    def __init__(
        self, plan: GroupPlan, counters: Counters | None = None, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Make the groups of a hierarchical plan. Collective over all ranks."""
        assert plan.hierarchical, plan.reason
        self.counters = counters or Counters()
        self._segment_bytes = segment_bytes
        self._scatter_group = _own_group(plan.node_groups)
        self._cross_group = _own_group(plan.cross_groups)
        self._gather_group = _own_group(plan.node_groups)
        self._scatter, self._cross, self._gather = (
            OrderedThread(kind) for kind in (NODE_REDUCE_SCATTER, CROSS_ALL_REDUCE, NODE_ALL_GATHER)
        )
        self._local_size = self._scatter_group.size()
        self.size = self._local_size * self._cross_group.size()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Reduce `tensor` in place over all ranks; every rank ends with the same bits.

        Any shape (the same on all ranks), strides and number of elements; any dtype that the backend adds up.
        "avg" divides by the number of ranks before the sum, as DDP does, so that half precision does not overflow.

        Raises:
            ValueError: an unknown op, or an average of integers.
        """
        self.start(tensor, op).result()

    def start(self, tensor: torch.Tensor, op: str = "sum") -> Future[torch.Tensor]:
        """Begin what `all_reduce` does; the future holds `tensor`, which nobody may touch before.

        On a GPU everything is put on the current stream, and the future is done when that has happened.
        """
        if op not in ("sum", "avg"):
            raise ValueError(f"op {op!r} is neither 'sum' nor 'avg'")
        if op == "avg" and not tensor.is_floating_point():
            raise ValueError(f"an average of {tensor.dtype} is not defined; use op 'sum'")
        tensor = tensor.detach()
        if op == "avg":
            tensor.div_(self.size)
        padding = -tensor.numel() % self._local_size
        in_place = tensor.is_contiguous() and not padding
        flat = tensor.view(-1) if in_place else torch.nn.functional.pad(tensor.reshape(-1), (0, padding))
        segments = [self._start_segment(segment) for segment in self._segments(flat)]

        def finish() -> torch.Tensor:
            for segment in segments:
                segment.result()
            if not in_place:
                tensor.copy_(flat[: tensor.numel()].view(tensor.shape))
            return tensor

        return self._gather.submit(finish) if tensor.device.type == "cpu" else _done(finish())

    def _segments(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut into pieces that divide among the node's ranks: none when empty, one on a GPU."""
        if flat.numel() == 0:
            return ()
        if flat.device.type != "cpu":
            return (flat,)
        part = max(self._segment_bytes // flat.element_size() // self._local_size, 1)
        return flat.split(part * self._local_size)

    def _start_segment(self, segment: torch.Tensor) -> Future[torch.Tensor]:
        if segment.device.type != "cpu":
            return _done(self._all_gather(segment, self._all_reduce(self._reduce_scatter(segment))))
        scattered = self._scatter.submit(lambda: self._reduce_scatter(segment))
        crossed = self._cross.submit(lambda: self._all_reduce(scattered.result()))
        return self._gather.submit(lambda: self._all_gather(segment, crossed.result()))

    def _reduce_scatter(self, segment: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the node's sum, shape (segment.numel() / local size,)."""
        with self._counted(NODE_REDUCE_SCATTER, segment):
            if segment.device.type != "cpu":
                part = segment.new_empty(segment.numel() // self._local_size)
                reduce_scatter_single(part, segment, group=self._scatter_group)
                return part
            # gloo's reduce-scatter takes twice as long as an exchange of parts that each owner adds up.
            parts = torch.empty_like(segment)
            dist.all_to_all_single(parts, segment, group=self._scatter_group)
            return parts.view(self._local_size, -1).sum(dim=0, dtype=segment.dtype)

    def _all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        with self._counted(CROSS_ALL_REDUCE, part):
            dist.all_reduce(part, group=self._cross_group)
        return part

    def _all_gather(self, segment: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        with self._counted(NODE_ALL_GATHER, part):
            all_gather_single(segment, part, group=self._gather_group)
        return segment

    @contextmanager
    def _counted(self, kind: str, tensor: torch.Tensor) -> Iterator[None]:
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start if tensor.device.type == "cpu" else None
        self.counters.add(kind, tensor.numel() * tensor.element_size(), seconds)


def _own_group(groups: RankGroups) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    return group


def _done(tensor: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(tensor)
    return future
