"""All-reduce in three stages: reduce-scatter in the node, all-reduce across nodes, all-gather in the node.

Each rank sends 1/L of the tensor over the network (L ranks per node), where a flat ring sends all of it over
the slowest link. After Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 4.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from toolkit.comm.compat import all_gather_single, reduce_scatter_single
from toolkit.comm.counters import Counters
from toolkit.topology.groups import GroupPlan

NODE_REDUCE_SCATTER = "node reduce-scatter"
CROSS_ALL_REDUCE = "cross all-reduce"
NODE_ALL_GATHER = "node all-gather"


@dataclass
class HierarchicalReducer:
    """This rank's two groups and the all-reduce over both.

    All ranks of `node` and `cross` must issue the same reductions in the same order, and nothing else may use
    these two groups meanwhile.
    """

    node: dist.ProcessGroup
    cross: dist.ProcessGroup
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def create(cls, plan: GroupPlan, counters: Counters | None = None) -> HierarchicalReducer:
        """Make the process groups of a hierarchical plan. Collective over all ranks."""
        assert plan.hierarchical, plan.reason
        node, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in plan.node_groups])
        cross, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in plan.cross_groups])
        return cls(node, cross, counters or Counters())

    @property
    def size(self) -> int:
        """The number of ranks that reduce together."""
        return self.node.size() * self.cross.size()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Reduce `tensor` in place over all ranks; every rank ends with the same bits.

        Any shape (the same on all ranks), strides and number of elements; any dtype that the backend adds up.
        "avg" divides by the number of ranks before the sum, as DDP does, so that half precision does not overflow.

        Raises:
            ValueError: an unknown op, or an average of integers.
        """
        if op not in ("sum", "avg"):
            raise ValueError(f"op {op!r} is neither 'sum' nor 'avg'")
        if op == "avg" and not tensor.is_floating_point():
            raise ValueError(f"an average of {tensor.dtype} is not defined; use op 'sum'")
        if tensor.numel() == 0:
            return
        with torch.no_grad():
            if op == "avg":
                tensor.div_(self.size)
            padding = -tensor.numel() % self.node.size()
            if tensor.is_contiguous() and not padding:
                self._reduce_flat(tensor.view(-1))
            else:
                flat = torch.nn.functional.pad(tensor.reshape(-1), (0, padding))
                self._reduce_flat(flat)
                tensor.copy_(flat[: tensor.numel()].view(tensor.shape))

    def _reduce_flat(self, flat: torch.Tensor) -> None:
        with self._counted(NODE_REDUCE_SCATTER, flat):
            chunk = self._reduce_scatter(flat)
        with self._counted(CROSS_ALL_REDUCE, chunk):
            dist.all_reduce(chunk, group=self.cross)
        with self._counted(NODE_ALL_GATHER, chunk):
            all_gather_single(flat, chunk, group=self.node)

    def _reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the node's sum, shape (flat.numel() / local size,)."""
        local = self.node.size()
        if flat.device.type != "cpu":
            chunk = flat.new_empty(flat.numel() // local)
            reduce_scatter_single(chunk, flat, group=self.node)
            return chunk
        # gloo's reduce-scatter is slower than an exchange of parts that each owner adds up in the order of ranks.
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat, group=self.node)
        return parts.view(local, -1).sum(dim=0, dtype=flat.dtype)

    @contextmanager
    def _counted(self, kind: str, tensor: torch.Tensor) -> Iterator[None]:
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start if tensor.device.type == "cpu" else None
        self.counters.add(kind, tensor.numel() * tensor.element_size(), seconds)
