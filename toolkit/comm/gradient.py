"""DDP communication hooks: reduce gradients in two tiers (in nodes, across nodes), or with the fastest algorithm.

The order of events in one backward pass on the CPU:

1. DDP calls the hook as soon as all gradients of a bucket are ready, in the same order of buckets on all ranks.
2. The hook starts the reduction in a thread, and returns a future; the backward pass continues.
3. The thread averages the bucket in place and completes the future, also if the reduction failed.
4. At the end of the backward pass, DDP waits for its futures. A callback that runs after it raises an error of the
   reduction from `backward` with its original type.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of its hook and rejects strings.

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from toolkit.comm.communicator import Communicator
from toolkit.comm.compat import after_backward, world_timeout
from toolkit.comm.compression.exchange import NodeTiers
from toolkit.comm.compression.reducer import GradientCompression
from toolkit.comm.counters import Counters
from toolkit.comm.handle import Handle
from toolkit.comm.hierarchical import HierarchicalReducer, own_group
from toolkit.comm.peers import Peers
from toolkit.comm.presence import BEAT_S
from toolkit.comm.tiers import choose_tiers, say
from toolkit.comm.watched import WatchedCalls
from toolkit.errors import ToolkitError
from toolkit.topology.facts import Topology
from toolkit.topology.groups import plan_groups
from toolkit.world.facts import World

__all__ = ["Reduction", "find_reduction"]

GRADIENTS = "gradient reduction"
Hook = Callable[[None, dist.GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True)
class Reduction:
    """A communication hook for DDP (None: DDP's own reduction), and a log line with the reduction and its reason."""

    hook: Hook | None
    line: str

    def register_on(self, model: DistributedDataParallel, *, overlap: bool = True) -> None:
        """Register the hook on `model`, once; without `overlap`, the backward pass waits for each bucket."""
        hook = self.hook if overlap else without_overlap(self.hook, model.process_group)
        if hook is not None:
            model.register_comm_hook(None, hook)


def find_reduction(
    group: dist.ProcessGroup,
    world: World,
    setting: str,
    topology: Topology,
    counters: Counters | None = None,
    *,
    timeout_s: float | None = None,
    beat_s: float = BEAT_S,
    compression: GradientCompression | None = None,
) -> Reduction:
    """Choose the reduction that averages gradients over `group`; rank 0 prints it to stderr. Collective.

    `setting` is "auto" or "hierarchical" (two tiers if the layout has them), "flat" (DDP's own), or "measured": toolkit
    measures the links between the ranks for some seconds and reduces each bucket with its fastest algorithm. With
    `compression`, its `scope` decides which ranks exchange compressed gradients, whatever `setting` is.

    A backward pass that waits longer than `timeout_s` for a rank (None: the timeout of the default process group), or
    loses one, raises a CollectiveError that names the rank. `beat_s` is the interval of the ranks' heartbeats.

    Raises:
        CollectiveError: a rank did not join.
        ToolkitError: `setting` is "hierarchical" and the layout, or the model's group, does not allow it, or "measured"
            and toolkit cannot measure the links.
    """
    if compression is not None or setting == "measured":
        patience_s = world_timeout().total_seconds() if timeout_s is None else timeout_s
        tiers = None if compression else topology
        communicator = Communicator(
            world, group, topology=tiers, counters=counters, timeout_s=patience_s, beat_s=beat_s
        )
        if compression is None:
            return _by_measurement(communicator, world)
        _use_tiers(compression, group.size() == world.size, topology, patience_s)
        line = say(world, f"{GRADIENTS}: {compression.describe(communicator.size)}")
        return Reduction(compressed_hook(communicator, compression), line)
    plan, line = choose_tiers(GRADIENTS, group.size(), world, setting, topology)
    if not plan.hierarchical:
        return Reduction(None, line)
    calls = WatchedCalls(world, GRADIENTS, beat_s=beat_s)
    with calls.making():
        reducer = HierarchicalReducer(plan, counters, timeout_s=timeout_s)
    return Reduction(hierarchical_hook(reducer, calls), line)


def _use_tiers(compression: GradientCompression, has_all_ranks: bool, topology: Topology, timeout_s: float) -> None:
    """Compress only between nodes, if the algorithm and the layout of ranks allow it. Collective."""
    if not (compression.can_use_tiers and has_all_ranks and (plan := plan_groups(topology)).hierarchical):
        return
    node, across = own_group(plan.node_groups, timeout_s), own_group(plan.cross_groups, timeout_s)
    compression.use_tiers(NodeTiers(node, Peers(across, tuple(range(across.size())), across.rank())))


def _by_measurement(communicator: Communicator, world: World) -> Reduction:
    if not communicator.can_measure:
        raise ToolkitError(
            "measuring links requires two or more CPU ranks with known nodes",
            where="parallel.reduction",
            fix='set reduction = "auto"; on GPUs NCCL tunes itself',
        )
    choice = communicator.choose_by_measurement()
    return Reduction(measured_hook(communicator), say(world, f"{GRADIENTS}: chosen by measurement: {choice.line}"))


def compressed_hook(communicator: Communicator, compression: GradientCompression) -> Hook:
    """Return a communication hook that averages each bucket by `compression`; on a GPU, `backward` waits for each."""
    compression.kept.peers = communicator.peers

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        names = compression.names_of(bucket.parameters())
        reduced = communicator.start.reduce_compressed(compression, names, bucket.gradients())
        if gradients.device.type != "cpu":
            reduced.wait()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[gradients.device])
            done.set_result(gradients)
            return done
        return _future_of(reduced, gradients)

    return hook


def without_overlap(hook: Hook | None, group: dist.ProcessGroup) -> Hook:
    """Return a hook like `hook`, or DDP's own reduction, that completes each bucket before the backward pass continues."""

    def own(bucket: dist.GradBucket) -> torch.Tensor:
        gradients = bucket.buffer().div_(group.size())
        dist.all_reduce(gradients, group=group)
        return gradients

    def blocking(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = own(bucket) if hook is None else hook(state, bucket).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[] if gradients.device.type == "cpu" else [gradients.device]
        )
        done.set_result(gradients)
        return done

    return blocking


def measured_hook(communicator: Communicator) -> Hook:
    """Return a communication hook that averages each bucket with its fastest measured algorithm."""

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        return _future_of(communicator.start.all_reduce(gradients, "avg", "fastest"), gradients)

    return hook


def _future_of(reduced: Handle[Any], gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return the future that DDP waits for; as in `hierarchical_hook`, `backward` raises the original error."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.when_done(lambda: future.set_result(gradients))
    after_backward(lambda: _raise_failure_of(reduced))
    return future


def hierarchical_hook(reducer: HierarchicalReducer, calls: WatchedCalls | None = None) -> Hook:
    """Return a hook for `register_comm_hook(None, hook)` that averages gradients like DDP.

    Buckets are reduced while the backward pass continues: on the CPU by the reducer's threads, on a GPU on one separate
    stream. DDP passes buckets in the same order on all ranks, which the reducer requires. `calls` adds the missing
    ranks to errors.
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
            # DDP would turn an error in its future into a RuntimeError; the callback raises the original one in `backward`.
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


def _raise_failure_of(done: Future[torch.Tensor] | Handle[Any]) -> None:
    done.wait() if isinstance(done, Handle) else done.result()
