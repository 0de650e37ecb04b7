"""Reduce the gradients of DistributedDataParallel hierarchically, where the layout of ranks makes it worth it."""

# No `from __future__ import annotations` here: DDP looks at the annotations of its hook and refuses strings.

import sys
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.counters import Counters
from toolkit.comm.hierarchical import HierarchicalReducer
from toolkit.errors import ToolkitError
from toolkit.topology.facts import Topology
from toolkit.topology.groups import GroupPlan, plan_reduction
from toolkit.world.facts import World

Hook = Callable[[None, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def choose_reduction(
    model: DistributedDataParallel, world: World, setting: str, topology: Topology, counters: Counters | None = None
) -> str:
    """Register the hierarchical reduction on `model` when `setting` and `topology` say so. Collective, call once.

    Returns one line that says which reduction is used and why; rank 0 prints it on stderr too.

    Raises:
        ToolkitError: `setting` is "hierarchical" and the layout, or the model's group, does not allow it.
    """
    plan = plan_reduction(topology, setting)
    ranks = model.process_group.size()
    if plan.hierarchical and ranks != world.size:
        reason = f"the model is replicated over {ranks} of {world.size} ranks"
        if setting == "hierarchical":
            raise ToolkitError(reason, where="parallel.reduction", fix='set reduction = "flat"')
        plan = GroupPlan((), (), reason)
    if plan.hierarchical:
        model.register_comm_hook(None, hierarchical_hook(HierarchicalReducer(plan, counters)))
    line = f"gradient reduction: {'hierarchical' if plan.hierarchical else 'flat'} ({plan.reason})"
    if world.rank == 0:
        sys.stderr.write(line + "\n")
    return line


def hierarchical_hook(reducer: HierarchicalReducer) -> Hook:
    """Make a communication hook for `register_comm_hook(None, hook)`; it averages as DDP does.

    Buckets are reduced while the backward pass goes on: on the CPU by the reducer's threads, on a GPU on one stream
    of their own. DDP hands out buckets in the same order on all ranks, which is what the reducer asks for.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if gradients.device.type == "cpu":
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            reducer.start(gradients, "avg").add_done_callback(lambda done: _hand_over(done, future))
            return future
        if gradients.device not in streams:
            streams[gradients.device] = torch.cuda.Stream(gradients.device)
        stream = streams[gradients.device]
        stream.wait_stream(torch.cuda.current_stream(gradients.device))
        future = torch.futures.Future(devices=[gradients.device])
        with torch.cuda.stream(stream):
            future.set_result(reducer.start(gradients, "avg").result())
        return future

    return hook


def _hand_over(done: Future[torch.Tensor], future: torch.futures.Future[torch.Tensor]) -> None:
    """Pass on a result, or an exception, which DDP raises in the backward pass."""
    if error := done.exception():
        future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation says the result's type
    else:
        future.set_result(done.result())
