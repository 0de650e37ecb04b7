"""The result of a measurement of collectives: columns as nccl-tests defines them, and its file. Standard library only.

`metrics/collectives.json` of a run is one `Measurement`, and so is the output of `toolkit bench collectives --json`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import NotFoundError
from toolkit.metrics.typed_json import read_typed
from toolkit.rundir.files import read_json, write_json

__all__ = [
    "ELEMENT_BYTES", "FILE", "OPERATIONS", "Limit", "Measurement", "RankPlace", "Row", "Series", "Timing",
    "read_measurement", "sizes_of", "write_measurement",
]  # fmt: skip

FILE = "collectives.json"
ELEMENT_BYTES = 4  # all measurements use 32-bit floats, nccl-tests' default
ALIGNMENT_BYTES = 16  # one rank's part is a multiple of this, as in nccl-tests


def _whole(ranks: int) -> float:
    return 1.0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class Operation:
    """One collective as nccl-tests measures it.

    The size S is that of all data: a rank's output of an all-gather, its input of a reduce-scatter or all-to-all.
    `bus_factor`
    of n ranks converts bandwidth to bus bandwidth (nccl-tests, doc/PERFORMANCE.md). `crossing` of (ranks, nodes, ranks
    per
    node) is how many times S must leave, or enter, the busiest node at least.
    """

    name: str
    program: str
    bus_factor: Callable[[int], float]
    crossing: Callable[[int, int, int], float]
    reduces: bool = False
    has_root: bool = False
    in_parts: bool = False  # the column count has one rank's part

    @property
    def reduction(self) -> str:
        """The column redop."""
        return "sum" if self.reduces else "none"

    @property
    def root(self) -> int:
        """The column root."""
        return 0 if self.has_root else -1

    def count(self, size_bytes: int, ranks: int) -> int:
        """The column count: elements of all data, or of one rank's part."""
        return size_bytes // ELEMENT_BYTES // (ranks if self.in_parts else 1)

    def bus_limit(self, limit: Limit | None, ranks: int, nodes: int, on_node: int) -> float | None:
        """Return the bus bandwidth within a hardware limit, in GB/s."""
        if limit is None:
            return None
        if limit.of == "rank":
            return limit.gb_per_s
        return limit.gb_per_s * self.bus_factor(ranks) / self.crossing(ranks, nodes, on_node)


OPERATIONS: Mapping[str, Operation] = types.MappingProxyType(
    {
        one.name: one
        for one in (
            Operation(
                "all_reduce", "all_reduce_perf", lambda n: 2 * _others(n), lambda n, nodes, _: 2 * _others(nodes),
                reduces=True,
            ),
            Operation("all_gather", "all_gather_perf", _others, lambda n, nodes, _: _others(nodes), in_parts=True),
            Operation(
                "reduce_scatter", "reduce_scatter_perf", _others, lambda n, nodes, _: _others(nodes), reduces=True,
                in_parts=True,
            ),
            Operation(
                "all_to_all", "alltoall_perf", _others, lambda n, nodes, local: local * (n - local) / n, in_parts=True
            ),
            Operation("broadcast", "broadcast_perf", _whole, lambda n, nodes, _: 1.0, has_root=True),
            Operation("reduce", "reduce_perf", _whole, lambda n, nodes, _: 1.0, reduces=True, has_root=True),
            Operation("send_recv", "sendrecv_perf", _whole, lambda n, nodes, _: 1.0),
        )
    }
)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """One half of a row, out of place or in place.

    time_us: mean over the iterations, of the slowest rank.
    median_us: median, of the slowest rank.
    algbw_gb_per_s: size by time.
    busbw_gb_per_s: that times the operation's factor.
    wrong: wrong elements on all ranks in one more, checked call.
    """

    time_us: float
    median_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: int

    @classmethod
    def of(
        cls, operation: Operation, size_bytes: int, ranks: int, mean_s: float, median_s: float, wrong: int
    ) -> Timing:
        """Return the columns that follow from a time."""
        bandwidth = size_bytes / mean_s / 1e9
        return cls(mean_s * 1e6, median_s * 1e6, bandwidth, bandwidth * operation.bus_factor(ranks), wrong)


@dataclass(frozen=True)
class Row:
    """One size. A half is null if the operation has no such form; so is the model's time without a prediction."""

    size_bytes: int
    count: int
    out_of_place: Timing | None
    in_place: Timing | None
    model_us: float | None

    @property
    def halves(self) -> tuple[Timing, ...]:
        """The measured halves."""
        return tuple(half for half in (self.out_of_place, self.in_place) if half is not None)

    @property
    def usual(self) -> Timing:
        """The half that programs use: in place if possible."""
        return self.halves[-1]


@dataclass(frozen=True)
class Series:
    """One operation over all sizes: by `library` ("torch" or "mpi"), and by `algorithm` if it is toolkit's."""

    operation: str
    library: str
    algorithm: str
    busbw_limit_gb_per_s: float | None
    rows: tuple[Row, ...]

    @property
    def wrong(self) -> int:
        """Wrong elements in all rows."""
        return sum(half.wrong for row in self.rows for half in row.halves)

    @property
    def average_busbw_gb_per_s(self) -> float:
        """Mean over all halves of all rows, as in nccl-tests."""
        values = [half.busbw_gb_per_s for row in self.rows for half in row.halves]
        return math.fsum(values) / max(1, len(values))


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank: `device` is its number among the ranks of its host, `bus` a GPU's PCI address or 0x00."""

    rank: int
    pid: int
    host: str
    device: int
    bus: str
    name: str


@dataclass(frozen=True)
class Limit:
    """What the hardware carries in one direction, for each "rank" or for a "node" with all its links."""

    gb_per_s: float
    of: str
    source: str


@dataclass(frozen=True)
class Measurement:
    """All results of one call, and what it skipped."""

    schema_version: int
    time: str
    toolkit: str
    torch: str
    mpi: str | None
    backend: str
    launcher: str
    iterations: int
    warmup: int
    first_bytes: int
    last_bytes: int
    factor: int
    ranks: tuple[RankPlace, ...]
    limit: Limit | None
    series: tuple[Series, ...]
    left_out: tuple[str, ...]

    @property
    def nodes(self) -> int:
        """The number of hosts."""
        return len({place.host for place in self.ranks})

    def title(self, series: Series) -> str:
        """Return what measured a series: "gloo, ring", "MPI"."""
        return "MPI" if series.library == "mpi" else f"{self.backend}, {series.algorithm}"

    def to_json(self) -> str:
        """Return one object on one line."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)


def sizes_of(operation: Operation, first_bytes: int, last_bytes: int, factor: int, ranks: int) -> tuple[int, ...]:
    """Return the sizes of an operation: from the first to the last by a factor.

    If each rank has a part, the first is rounded up to equal parts with nccl-tests' alignment; smaller ones do not
    exist.
    """
    step = ALIGNMENT_BYTES * ranks if operation.in_parts else ELEMENT_BYTES
    size = -(-first_bytes // step) * step
    found = []
    while size <= last_bytes:
        found.append(size)
        size *= factor
    return tuple(found)


def write_measurement(path: Path, measurement: Measurement) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(measurement))


def read_measurement(path: Path) -> Measurement:
    """Read the measurement in a file.

    Raises:
        ToolkitError: there is none, or it is invalid; names the key.
    """
    if not path.exists():
        raise NotFoundError(
            "no measurement of collectives", where=str(path), fix="create one: `toolkit run bench_collectives -n 2`"
        )
    found: Measurement = read_typed(
        read_json(path),
        Measurement,
        str(path),
        what="a measurement",
        fix="pass a file of `toolkit bench collectives --json`, or of a run's metrics, of this version",
    )
    return found
