"""Measure collectives over all ranks, by operation, algorithm and size, with the communicator and with MPI."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from toolkit.comm.bench.mpi_trials import mpi_library, mpi_trials
from toolkit.comm.bench.request import BenchRequest, on_backend
from toolkit.comm.bench.trial import CollectiveCase, Room, Trial, time_calls
from toolkit.comm.communicator import Communicator
from toolkit.comm.cost.choice import Choice
from toolkit.comm.peers import Peers
from toolkit.errors import ToolkitError
from toolkit.metrics.collectives import ELEMENT_BYTES, OPERATIONS, Limit, Measurement, RankPlace, Row, Series, Timing
from toolkit.metrics.collectives_table import foot, head, left_out, line
from toolkit.rundir.files import utc_now
from toolkit.topology.facts import Topology
from toolkit.topology.gather import gather_topology
from toolkit.topology.tiers_found import tiers_of_topology
from toolkit.units import format_bytes
from toolkit.version import VERSION
from toolkit.world.facts import World

__all__ = ["measure"]

# The algorithm of each operation for which the communicator has only one.
ONLY_ALGORITHM = {
    "all_gather": "flat", "reduce_scatter": "direct", "all_to_all": "flat", "broadcast": "tree", "reduce": "tree",
    "send_recv": "exchange",
}  # fmt: skip
Halves = tuple[Trial | None, Trial | None]  # out of place, in place


def torch_trials(communicator: Communicator, case: CollectiveCase, algorithm: str, room: Room) -> Halves:
    """Return the trials of the operation, out of place and in place.

    torch has no out-of-place all-reduce and broadcast. These trials copy the tensor first (in a broadcast, on the root
    only), and the time includes the copy.
    """
    peers = Peers(dist.group.WORLD, tuple(range(case.ranks)), case.rank)
    input_length = case.part if case.operation == "all_gather" else case.elements

    def sent(turn: int) -> torch.Tensor:
        return room.sent(input_length, turn)

    def copied(turn: int, *, has_input: bool = True) -> torch.Tensor:
        received = room.received(case.elements, turn)
        return received.copy_(sent(turn)) if has_input else received

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        return communicator.all_reduce(tensor, "sum", algorithm)

    calls: dict[str, tuple[Callable[[int], torch.Tensor | None], Callable[[int], torch.Tensor | None] | None]] = {
        "all_reduce": (lambda turn: all_reduce(copied(turn)), lambda turn: all_reduce(sent(turn))),
        "broadcast": (
            lambda turn: communicator.broadcast(copied(turn, has_input=case.rank == 0), 0),
            lambda turn: communicator.broadcast(sent(turn), 0),
        ),
        "send_recv": (lambda turn: _exchange(peers, case, sent(turn), room.received(case.elements, turn)), None),
        "all_gather": (lambda turn: communicator.all_gather(sent(turn)), None),
        "reduce_scatter": (lambda turn: communicator.reduce_scatter(sent(turn)), None),
        "all_to_all": (lambda turn: communicator.all_to_all(sent(turn)), None),
        "reduce": (lambda turn: communicator.reduce(sent(turn), 0), None),
    }
    out_of_place, in_place = calls[case.operation]
    return Trial(out_of_place, sent, case), None if in_place is None else Trial(in_place, sent, case)


def _exchange(peers: Peers, case: CollectiveCase, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Send and receive concurrently, as in a round of a ring."""
    following, previous = case.neighbours
    peers.exchange([(sent, following)], [(received, previous)])
    return received


_COPIES = 7


def find_limit(world: World, topology: Topology, last_bytes: int) -> tuple[Limit | None, str]:
    """Return (the limit of the hardware, the reason if there is none). Assumed rates are never used.

    Not collective. On a single node without GPUs, the calling rank measures a memory copy.
    """
    nodes = len(topology.ranks_by_host) + len(topology.unplaced_ranks)
    on_gpu = world.device.startswith("cuda")
    if nodes == 1 and not on_gpu:
        return Limit(
            copy_rate(last_bytes), "rank", f"memcpy of one core, {format_bytes(last_bytes)} at a time, measured"
        ), ""
    try:
        tiers = tiers_of_topology(topology)
    except ToolkitError as error:
        return None, f"limit: {error.message}"
    everybody = np.arange(tiers.size).reshape(1, -1)
    level = tiers.levels[int(tiers.finest_common(everybody)[0])]
    if on_gpu and level.name == "clique":
        return Limit(level.link.bytes_per_s / 1e9, "rank", level.link.source), ""
    if nodes == 1:
        return None, "limit: these GPUs are not all connected by NVLink, and the rate of PCIe is unknown"
    return _adapters(topology)


def _adapters(topology: Topology) -> tuple[Limit | None, str]:
    """Return the total rate of the active ports of a node, for the node with the lowest total."""
    limits = []
    for node in topology.nodes:
        ports = [port.rate_gbit_per_s for nic in node.hardware.nics.value or () for port in nic.ports]
        known = [(rate.value, rate.source) for rate in ports if rate.value is not None]
        if not known:
            return None, f"limit: the rate of every network adapter of {node.host.value} is unknown"
        total = sum(rate for rate, _ in known)
        sources = ", ".join(dict.fromkeys(source for _, source in known))
        description = f"{len(known)} active port{'s' * (len(known) != 1)} of a node, {total:g} Gbit/s by {sources}"
        limits.append(Limit(total / 8, "node", description))
    return min(limits, key=lambda limit: limit.gb_per_s), ""


def copy_rate(size_bytes: int) -> float:
    """Return the GB/s of a memory copy by one core, the best of several."""
    source, target = np.zeros(max(size_bytes, 1), np.uint8), np.ones(max(size_bytes, 1), np.uint8)
    source += 1  # allocates pages: unwritten ones all map to one zero page, which is always cached
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return len(source) / max(min(seconds), 1e-9) / 1e9


_MODEL_BUDGET_S = 2.0  # for each tier of links

Say = Callable[[str], object]


@dataclass(frozen=True)
class _PlannedSeries:
    """One series to be measured."""

    operation: str
    library: str
    algorithm: str


def measure(world: World, request: BenchRequest, say: Say) -> Measurement:
    """Measure the requested operations; on rank 0, pass the table to `say` line by line.

    Collective over all ranks of the default group. If the run receives a stop request, the result contains the sizes
    measured until then.

    Raises:
        ToolkitError: these ranks cannot measure the request.
    """
    world = on_backend(world, request.backend)
    request.check_world(world)
    topology = gather_topology(world)
    with Communicator(world, topology=topology) as communicator:
        _check_algorithms(request, communicator)
        first, last = request.first_and_last_bytes
        limit, missing = find_limit(world, topology, last) if world.rank == 0 else (None, "")
        library, no_mpi = mpi_library(world) if request.mpi else (None, "")
        measurement = Measurement(
            schema_version=1, time=utc_now(), toolkit=VERSION, torch=torch.__version__, mpi=library,
            backend="nccl" if world.device.startswith("cuda") else "gloo", launcher=world.launcher,
            iterations=request.iterations, warmup=request.warmup, first_bytes=first, last_bytes=last,
            factor=request.factor, ranks=_places(world), limit=limit, series=(),
            left_out=tuple(filter(None, (missing, no_mpi))),
        )  # fmt: skip
        bench = _Bench(world, request, communicator, measurement, _model_of(request, communicator))
        return bench.run(say if world.rank == 0 else _ignore)


def _model_of(request: BenchRequest, communicator: Communicator) -> Choice | None:
    """Return a model that predicts all-reduces from measured links; None if toolkit cannot measure them."""
    if "all_reduce" not in request.operation_names or not communicator.can_measure:
        return None
    return communicator.choose_by_measurement(_MODEL_BUDGET_S)


def _ignore(_: str) -> None:
    """Print nothing, on ranks other than 0."""


def _check_algorithms(request: BenchRequest, communicator: Communicator) -> None:
    if "all_reduce" not in request.operation_names or request.every_algorithm:
        return
    for name in request.algorithm_names:
        if name not in communicator.algorithms:
            raise ToolkitError(
                f"all-reduce algorithm {name!r} does not support this layout of ranks (docs/collectives.md)",
                where="args.algorithms",
                fix=f"use all, or some of {', '.join(communicator.algorithms)}",
            )


def _places(world: World) -> tuple[RankPlace, ...]:
    bus, name = "0x00", "CPU"
    if world.device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(world.device)
        numbers = [getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")]
        bus, name = "{:04x}:{:02x}:{:02x}".format(*numbers), properties.name
    own = RankPlace(world.rank, os.getpid(), world.host, world.local_rank, bus, name)
    places: list[RankPlace] = [own] * world.size
    dist.all_gather_object(places, own)
    return tuple(places)


class _Bench:
    """One measurement in progress."""

    def __init__(
        self,
        world: World,
        request: BenchRequest,
        communicator: Communicator,
        measurement: Measurement,
        model: Choice | None,
    ) -> None:
        self.world = world
        self.request = request
        self.communicator = communicator
        self.measurement = measurement
        self.model = model
        self.sizes_done = 0
        self.stopped = False

    def run(self, say: Say) -> Measurement:
        for plan in self._plans():
            rows: list[Row] = []
            series = Series(plan.operation, plan.library, plan.algorithm, self._bus_limit(plan.operation), ())
            for text in head(self.measurement, series):
                say(text)
            for row in self._rows(plan):
                rows.append(row)
                say(line(series, row))
            series = replace(series, rows=tuple(rows))
            for text in foot(series):
                say(text)
            self.measurement = replace(self.measurement, series=(*self.measurement.series, series))
            if self.stopped:
                reason = "the remaining series: the run received a stop request"
                self.measurement = replace(self.measurement, left_out=(*self.measurement.left_out, reason))
                break
        for text in left_out(self.measurement):
            say(text)
        return self.measurement

    def _plans(self) -> Iterator[_PlannedSeries]:
        for operation in self.request.operation_names:
            if operation != "all_reduce":
                yield _PlannedSeries(operation, "torch", ONLY_ALGORITHM[operation])
            else:
                every = self.request.every_algorithm
                for algorithm in self.communicator.algorithms if every else self.request.algorithm_names:
                    yield _PlannedSeries(operation, "torch", algorithm)
            if self.measurement.mpi is not None:
                yield _PlannedSeries(operation, "mpi", "")

    def _bus_limit(self, operation: str) -> float | None:
        limit: Limit | None = self.measurement.limit
        hosts = [place.host for place in self.measurement.ranks]
        on_node = max(map(hosts.count, hosts))
        return OPERATIONS[operation].bus_limit(limit, self.world.size, self.measurement.nodes, on_node)

    def _rows(self, plan: _PlannedSeries) -> Iterator[Row]:
        sizes = self.request.sizes_of(plan.operation, self.world.size)
        device = "cpu" if plan.library == "mpi" else self.world.device
        room = Room(sizes[-1] // ELEMENT_BYTES, device)
        for size in sizes:
            yield self._row(plan, size, room)
            self.sizes_done += 1
            self.stopped = self.world.should_stop(self.sizes_done)
            if self.stopped:
                return

    def _row(self, plan: _PlannedSeries, size: int, room: Room) -> Row:
        elements = size // ELEMENT_BYTES
        case = CollectiveCase(plan.operation, self.world.rank, self.world.size, elements, room.device)
        trials: Halves = (
            mpi_trials(case, room)
            if plan.library == "mpi"
            else torch_trials(self.communicator, case, plan.algorithm, room)
        )
        operation = OPERATIONS[plan.operation]
        out_of_place, in_place = (self._time(trial, plan.operation, size, room) for trial in trials)
        predicted = None
        if self.model and (plan.operation, plan.library) == ("all_reduce", "torch"):
            predicted = self.model.seconds(plan.algorithm, size)
        return Row(
            size, operation.count(size, self.world.size), out_of_place, in_place,
            None if predicted is None else predicted * 1e6,
        )  # fmt: skip

    def _time(self, trial: Trial | None, operation: str, size: int, room: Room) -> Timing | None:
        if trial is None:
            return None
        room.clear()
        for turn in range(self.request.warmup):
            trial.call(turn)
        self.communicator.barrier()
        mean_s, median_s = time_calls(trial.call, self.request.iterations, room.device)
        self.communicator.barrier()
        slowest = torch.tensor([mean_s, median_s], dtype=torch.float64)
        wrong = torch.tensor([trial.count_wrong()])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(wrong)
        mean_s, median_s = slowest.tolist()
        return Timing.of(OPERATIONS[operation], size, self.world.size, mean_s, median_s, int(wrong))
