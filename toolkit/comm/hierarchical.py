"""All-reduce in three stages: reduce-scatter in the node, all-reduce across nodes, all-gather in the node.

With N nodes of L ranks and S bytes, 2(N-1)/N S bytes leave each node. In a flat ring, 2(NL-1)/NL S leave it if
consecutive ranks are on the same node, and L times as much if ranks are assigned to nodes round-robin. The latency of
the ring grows with NL, here with N. The stages of different segments run concurrently, so that the network need not
wait for the node. After the 2D-torus all-reduce of Mikami et al., "Massively Distributed SGD", arXiv:1811.05233 (2018).
"""

from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist

from toolkit.comm.compat import all_gather_single, reduce_scatter_single, world_timeout
from toolkit.comm.counters import Counters
from toolkit.comm.ordered_thread import OrderedThread
from toolkit.comm.reductions import BACKEND_OPS, OPS, backend_all_reduce, fold_rows
from toolkit.topology.groups import GroupPlan, RankGroups

NODE_REDUCE_SCATTER = "node reduce-scatter"
CROSS_ALL_REDUCE = "cross all-reduce"
NODE_ALL_GATHER = "node all-gather"
SEGMENT_BYTES = 2 * 1024 * 1024


class HierarchicalReducer:
    """Performs the all-reduce over this rank's node group and cross-node group.

    Each stage has its own thread and its own process group. Work enters every stage in call order, and all ranks must
    make the same calls in the same order. Therefore ranks cannot deadlock, however many reductions are in progress.
    """

    def __init__(
        self,
        plan: GroupPlan,
        counters: Counters | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        timeout_s: float | None = None,
    ) -> None:
        """Create the groups of a hierarchical plan, collectively; `timeout_s` defaults to that of the default group."""
        assert plan.hierarchical, plan.reason
        self.counters = counters or Counters()
        self._segment_bytes = segment_bytes
        self._scatter_group = own_group(plan.node_groups, timeout_s)
        self._cross_group = own_group(plan.cross_groups, timeout_s)
        self._gather_group = own_group(plan.node_groups, timeout_s)
        self._scatter, self._cross, self._gather = (
            OrderedThread(kind) for kind in (NODE_REDUCE_SCATTER, CROSS_ALL_REDUCE, NODE_ALL_GATHER)
        )
        self._local_size = self._scatter_group.size()
        self.size = self._local_size * self._cross_group.size()

    def close(self) -> None:
        """Stop the threads. torch closes the groups."""
        for stage in (self._scatter, self._cross, self._gather):
            stage.close()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Reduce `tensor` in place over all ranks; all ranks get bitwise the same result.

        The tensor may have any shape (the same on all ranks), any strides, and any dtype that the backend can sum. `op`
        is "sum", "min", "max", "product", or "avg", which divides by the number of ranks before the sum, like DDP, so
        that half precision does not overflow.

        Raises:
            ValueError: an unknown op, or an average of integers.
        """
        self.start(tensor, op).result()

    def start(self, tensor: torch.Tensor, op: str = "sum") -> Future[torch.Tensor]:
        """Start `all_reduce`; the future returns `tensor`, which the caller must not use until then.

        On a GPU all work goes to the current stream, and the returned future is already done.
        """
        if op not in OPS:
            raise ValueError(f"expected an op of {', '.join(OPS)}, got {op!r}")
        if op == "avg" and not tensor.is_floating_point():
            raise ValueError(f"an average of {tensor.dtype} is not defined; use op 'sum'")
        tensor = tensor.detach()
        if op == "avg":
            tensor.div_(self.size)
            op = "sum"
        padding = -tensor.numel() % self._local_size
        in_place = tensor.is_contiguous() and not padding
        flat = tensor.view(-1) if in_place else torch.nn.functional.pad(tensor.reshape(-1), (0, padding))
        segments = [self._start_segment(segment, op) for segment in self._segments(flat)]

        def finish() -> torch.Tensor:
            for segment in segments:
                segment.result()
            if not in_place:
                tensor.copy_(flat[: tensor.numel()].view(tensor.shape))
            return tensor

        return self._gather.submit(finish) if tensor.device.type == "cpu" else _done(finish())

    def _segments(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split into segments that are divisible by the number of ranks per node: none if empty, one on a GPU."""
        if flat.numel() == 0:
            return ()
        if flat.device.type != "cpu":
            return (flat,)
        part = max(self._segment_bytes // flat.element_size() // self._local_size, 1)
        return flat.split(part * self._local_size)

    def _start_segment(self, segment: torch.Tensor, op: str) -> Future[torch.Tensor]:
        if segment.device.type != "cpu":
            return _done(self._all_gather(segment, self._all_reduce(self._reduce_scatter(segment, op), op)))
        scattered = self._scatter.submit(lambda: self._reduce_scatter(segment, op))
        crossed = self._cross.submit(lambda: self._all_reduce(scattered.result(), op))
        return self._gather.submit(lambda: self._all_gather(segment, crossed.result()))

    def _reduce_scatter(self, segment: torch.Tensor, op: str) -> torch.Tensor:
        """Return this rank's part of the node's result, shape (segment.numel() / local size,)."""
        with self.counters.timed(NODE_REDUCE_SCATTER, segment):
            return node_reduce_scatter(segment, op, self._scatter_group)

    def _all_reduce(self, part: torch.Tensor, op: str) -> torch.Tensor:
        with self.counters.timed(CROSS_ALL_REDUCE, part):
            backend_all_reduce(part, op, self._cross_group)
        return part

    def _all_gather(self, segment: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        with self.counters.timed(NODE_ALL_GATHER, part):
            all_gather_single(segment, part, group=self._gather_group)
        return segment


def node_reduce_scatter(segment: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the group's result, shape (segment.numel() / ranks of the group,)."""
    if segment.device.type != "cpu":
        part = segment.new_empty(segment.numel() // group.size())
        reduce_scatter_single(part, segment, op=BACKEND_OPS[op], group=group)
        return part
    # gloo's reduce-scatter takes twice as long as an all-to-all after which each rank sums its part.
    parts = torch.empty_like(segment)
    dist.all_to_all_single(parts, segment, group=group)
    return fold_rows(parts.view(group.size(), -1), op)


def own_group(groups: RankGroups, timeout_s: float | None = None) -> dist.ProcessGroup:
    """Create these groups and return this rank's group. Collective over all ranks."""
    timeout = world_timeout() if timeout_s is None else timedelta(seconds=timeout_s)
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], timeout=timeout)
    return group


def _done(tensor: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(tensor)
    return future
