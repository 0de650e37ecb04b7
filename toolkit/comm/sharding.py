"""FSDP2's all-gather and reduce-scatter in two tiers, within and across nodes, through torch's extension points.

With N nodes of L ranks and S bytes of parameters, (N-1)/N S enter and leave a node for every layout of ranks. A flat
ring moves (NL-1)/NL S into and out of a node if consecutive ranks are on the same node, and L times as much if ranks
are assigned to nodes round-robin.

torch 2.11 and 2.13 have the same extension points, `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter`.
Their argument types are private classes, of which torch calls only the two methods below.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from toolkit.comm.compat import all_gather_single
from toolkit.comm.counters import Counters
from toolkit.comm.hierarchical import node_reduce_scatter, own_group
from toolkit.comm.presence import BEAT_S
from toolkit.comm.tiers import choose_tiers
from toolkit.comm.watched import WatchedCalls
from toolkit.errors import ToolkitError
from toolkit.topology.facts import Topology
from toolkit.topology.groups import GroupPlan
from toolkit.world.facts import World

__all__ = ["choose_sharding_collectives"]

ALL_GATHER, REDUCE_SCATTER = "sharding all-gather", "sharding reduce-scatter"
CROSS_ALL_GATHER = "sharding cross all-gather"
NODE_ALL_GATHER = "sharding node all-gather"
NODE_REDUCE_SCATTER = "sharding node reduce-scatter"
CROSS_REDUCE_SCATTER = "sharding cross reduce-scatter"


def choose_sharding_collectives(
    model: FSDPModule,
    world: World,
    setting: str,
    topology: Topology,
    counters: Counters | None = None,
    *,
    timeout_s: float | None = None,
    beat_s: float = BEAT_S,
) -> str:
    """Install the two-tier collectives in all FSDP modules of `model` if `setting` and `topology` select them.

    Collective; call it once after `fully_shard`, for a model that is sharded over all ranks. `setting` is that of
    `[parallel] reduction`. Returns a log line with the choice and its reason; rank 0 also prints it to stderr. A
    forward or backward pass that waits longer than `timeout_s` for a rank (None: the timeout of the default
    process group), or loses one, raises a CollectiveError that names the rank. `beat_s` is the interval of the ranks'
    heartbeats.

    Raises:
        CollectiveError: a rank did not join.
        ToolkitError: `setting` is "hierarchical" and the layout does not allow it, or "measured".
    """
    if setting == "measured":
        raise ToolkitError(
            'reduction = "measured" selects all-reduce algorithms, but a sharded model uses all-gather and reduce-scatter',
            where="parallel.reduction",
            fix='set reduction = "auto"',
        )
    plan, line = choose_tiers("sharding collectives", world.size, world, setting, topology)
    if plan.hierarchical:
        calls = WatchedCalls(world, "sharding", beat_s=beat_s)
        with calls.making():
            tiers = ShardingTiers(plan, calls, counters, timeout_s=timeout_s)
        assert isinstance(model, torch.nn.Module)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(AllGatherInTiers(tiers))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(ReduceScatterInTiers(tiers))  # type: ignore[arg-type]
    return line


class ShardingTiers:
    """The groups of both tiers, separate for gather and scatter, because FSDP runs both concurrently on a GPU."""

    def __init__(
        self, plan: GroupPlan, calls: WatchedCalls, counters: Counters | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Create the groups of a hierarchical plan, collectively; `calls` adds the missing ranks to errors."""
        assert plan.hierarchical, plan.reason
        self.counters = counters or Counters()
        self.calls = calls
        self.plan = plan
        self.gather_cross, self.scatter_cross = (own_group(plan.cross_groups, timeout_s) for _ in range(2))
        self.gather_node, self.scatter_node = (own_group(plan.node_groups, timeout_s) for _ in range(2))
        self._orders: dict[tuple[dist.ProcessGroup, torch.device], torch.Tensor] = {}

    def order(self, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
        """Return the indices in `group` of the ranks, sorted by local index, then node; shape (ranks,).

        Raises:
            ToolkitError: the model is not sharded over all ranks.
        """
        if (group, device) not in self._orders:
            ranks = dist.get_process_group_ranks(group)
            sorted_ranks = [rank for across in self.plan.cross_groups for rank in across]
            if sorted(ranks) != sorted(sorted_ranks):
                raise ToolkitError(
                    f"expected a model sharded over all {len(sorted_ranks)} ranks, got {len(ranks)} ranks",
                    where="parallel.reduction",
                    fix='set reduction = "flat", or shard over all ranks',
                )
            self._orders[group, device] = torch.tensor([ranks.index(rank) for rank in sorted_ranks], device=device)
        return self._orders[group, device]


class _Allocates:
    """Allocates memory as torch's extension points require."""

    def __init__(self, tiers: ShardingTiers) -> None:
        self._tiers = tiers

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGatherInTiers(_Allocates):
    """All-gathers across nodes first, each rank its own part, then all parts within the node."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with the parts of all ranks, in group order. Always complete on return."""
        tiers = self._tiers
        order = tiers.order(group, input_tensor.device)
        across = input_tensor.new_empty(tiers.gather_cross.size() * input_tensor.numel())
        parts = torch.empty_like(output_tensor)
        with tiers.calls.watch(ALL_GATHER):
            with tiers.counters.timed(CROSS_ALL_GATHER, input_tensor):
                all_gather_single(across, input_tensor, group=tiers.gather_cross)
            with tiers.counters.timed(NODE_ALL_GATHER, across):
                all_gather_single(parts, across, group=tiers.gather_node)
        output_tensor.view(len(order), -1).index_copy_(0, order, parts.view(len(order), -1))


class ReduceScatterInTiers(_Allocates):
    """Reduces within the node first, so that only the sum of the node crosses the network."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` with this rank's part of the sum or average. Always complete on return.

        Raises:
            ToolkitError: `op` is neither sum nor average.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ToolkitError(
                f"the hierarchical reduce-scatter for FSDP supports sum and avg, got {op}",
                fix="call set_force_sum_reduction_for_comms(True) on the model",
            )
        tiers = self._tiers
        order = tiers.order(group, input_tensor.device)
        sorted_parts = input_tensor.view(len(order), -1).index_select(0, order).view(-1)
        with tiers.calls.watch(REDUCE_SCATTER):
            with tiers.counters.timed(NODE_REDUCE_SCATTER, sorted_parts):
                node_part = node_reduce_scatter(sorted_parts, "sum", tiers.scatter_node)
            with tiers.counters.timed(CROSS_REDUCE_SCATTER, node_part):
                output_tensor.copy_(node_reduce_scatter(node_part, "sum", tiers.scatter_cross))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(len(order))
