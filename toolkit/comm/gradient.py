"""Reduce the gradients of DistributedDataParallel by other ways than its own, where the layout of ranks makes it worth it."""

# No `from __future__ import annotations` here: DDP reads the annotations of its hook and rejects strings.

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.communicator import Communicator
from toolkit.comm.compat import after_backward, world_timeout
from toolkit.comm.counters import Counters
from toolkit.comm.handle import Handle
from toolkit.comm.hierarchical import HierarchicalReducer
from toolkit.comm.presence import BEAT_S
from toolkit.comm.tiers import choose_tiers, say
from toolkit.comm.watched import WatchedCalls
from toolkit.errors import ToolkitError
from toolkit.topology.facts import Topology
from toolkit.world.facts import World

GRADIENTS = "gradient reduction"
Hook = Callable[[None, dist.GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True)
class Reduction:
    """A communication hook for DDP, None for its own way; and a line that says which reduction it is and why."""

    hook: Hook | None
    line: str

    def register_on(self, model: DistributedDataParallel) -> None:
        """Have `model` reduce its gradients so. Call once."""
        if self.hook is not None:
            model.register_comm_hook(None, self.hook)


def find_reduction(
    group: dist.ProcessGroup,
    world: World,
    setting: str,
    topology: Topology,
    counters: Counters | None = None,
    *,
    timeout_s: float | None = None,
    beat_s: float = BEAT_S,
) -> Reduction:
    """How gradients are to be averaged over `group`; rank 0 says it on stderr. Collective.

    `setting` is "auto" or "hierarchical" (two levels, where there are two), "flat" (DDP's own), or "measured": the links
    between the ranks are measured for some seconds, and each bucket goes by the algorithm that is the fastest for it.

    A backward pass that waits longer than `timeout_s` for a rank (None: as long as the default process group), or that
    loses one, raises a CollectiveError, which names it; for that each rank shows at the store, once every `beat_s`, that
    it lives.

    Raises:
        CollectiveError: a rank did not come.
        ToolkitError: `setting` is "hierarchical" and the layout, or the model's group, does not allow it, or "measured"
            and the links cannot be.
    """
    if setting == "measured":
        return _by_measurement(group, world, topology, counters, timeout_s, beat_s)
    plan, line = choose_tiers(GRADIENTS, group.size(), world, setting, topology)
    if not plan.hierarchical:
        return Reduction(None, line)
    calls = WatchedCalls(world, GRADIENTS, beat_s=beat_s)
    with calls.making():
        reducer = HierarchicalReducer(plan, counters, timeout_s=timeout_s)
    return Reduction(hierarchical_hook(reducer, calls), line)


def _by_measurement(
    group: dist.ProcessGroup,
    world: World,
    topology: Topology,
    counters: Counters | None,
    timeout_s: float | None,
    beat_s: float,
) -> Reduction:
    patience_s = world_timeout().total_seconds() if timeout_s is None else timeout_s
    communicator = Communicator(world, group, topology=topology, counters=counters, timeout_s=patience_s, beat_s=beat_s)
    if not communicator.can_measure:
        raise ToolkitError(
            "links are measured between two or more ranks on the CPU whose nodes are known",
            where="parallel.reduction",
            fix='set reduction = "auto"; on GPUs NCCL measures for itself',
        )
    choice = communicator.choose_by_measurement()
    return Reduction(measured_hook(communicator), say(world, f"{GRADIENTS}: by measurement, {choice.line}"))


def measured_hook(communicator: Communicator) -> Hook:
    """Make a communication hook that averages each bucket by the algorithm that was measured to be the fastest for it."""

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduced = communicator.start.all_reduce(gradients, "avg", "fastest")
        # As below: an error is raised by `backward`, as it is.
        reduced.when_done(lambda: future.set_result(gradients))
        after_backward(lambda: _raise_failure_of(reduced))
        return future

    return hook


def hierarchical_hook(reducer: HierarchicalReducer, calls: WatchedCalls | None = None) -> Hook:
    """Make a communication hook for `register_comm_hook(None, hook)`; it averages as DDP does.

    Buckets are reduced while the backward pass continues: on the CPU by the reducer's threads, on a GPU on one stream
    of their own. DDP passes buckets in the same order on all ranks, which the reducer requires. `calls`
    explain what fails.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(gradients: torch.Tensor) -> Future[torch.Tensor]:
        if calls is None:
            return reducer.start(gradients, "avg")
        return calls.start(GRADIENTS, lambda: reducer.start(gradients, "avg"))

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if gradients.device.type == "cpu":
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            reduced = start(gradients)
            # DDP would make a RuntimeError of any error in its future, so it gets none: `backward` raises it as it is.
            reduced.add_done_callback(lambda _: future.set_result(gradients))
            after_backward(lambda: _raise_failure_of(reduced))
            return future
        if gradients.device not in streams:
            streams[gradients.device] = torch.cuda.Stream(gradients.device)
        stream = streams[gradients.device]
        stream.wait_stream(torch.cuda.current_stream(gradients.device))
        future = torch.futures.Future(devices=[gradients.device])
        with torch.cuda.stream(stream):
            future.set_result(start(gradients).result())
        return future

    return hook


def _raise_failure_of(done: Future[torch.Tensor] | Handle[torch.Tensor]) -> None:
    done.wait() if isinstance(done, Handle) else done.result()
