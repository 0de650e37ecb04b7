"""Reduce the gradients of DistributedDataParallel hierarchically, where the layout of ranks makes it worth it."""

# No `from __future__ import annotations` here: DDP looks at the annotations of its hook and refuses strings.

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
    model: DistributedDataParallel,
    world: World,
    setting: str,
    topology: Topology,
    counters: Counters | None = None,
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
        model.register_comm_hook(None, hierarchical_hook(HierarchicalReducer.create(plan, counters)))
    line = f"gradient reduction: {'hierarchical' if plan.hierarchical else 'flat'} ({plan.reason})"
    if world.rank == 0:
        sys.stderr.write(line + "\n")
    return line


def hierarchical_hook(reducer: HierarchicalReducer) -> Hook:
    """Make a communication hook for `register_comm_hook(None, hook)`; it averages as DDP does.

    Buckets are reduced while the backward pass goes on: on the CPU by one thread, on a GPU by one stream. One of
    each, so that the stages of different buckets never interleave: DDP hands out buckets in the same order on all
    ranks, hence all ranks issue the same collectives in the same order and cannot wait for each other in a circle.
    """
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradient-reduction")
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if gradients.device.type == "cpu":
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            worker.submit(_reduce_into, future, reducer, gradients)
            return future
        if gradients.device not in streams:
            streams[gradients.device] = torch.cuda.Stream(gradients.device)
        stream = streams[gradients.device]
        stream.wait_stream(torch.cuda.current_stream(gradients.device))
        future = torch.futures.Future(devices=[gradients.device])
        with torch.cuda.stream(stream):
            _reduce_into(future, reducer, gradients)
        return future

    return hook


def _reduce_into(
    future: torch.futures.Future[torch.Tensor], reducer: HierarchicalReducer, gradients: torch.Tensor
) -> None:
    try:
        reducer.all_reduce(gradients, op="avg")
    except Exception as error:  # noqa: BLE001 - DDP waits for the future and raises it in the backward pass
        future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation says the result's type
    else:
        future.set_result(gradients)
