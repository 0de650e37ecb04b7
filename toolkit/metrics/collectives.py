"""The results of a measurement of collectives, with the columns of nccl-tests, and their file. Standard library only.

`metrics/collectives.json` of a run contains a `Measurement`; so does the output of `toolkit bench collectives --json`.
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

    The size S is the total size: the output of an all-gather on a rank, or the input of a reduce-scatter or all-to-all.
    `bus_factor(ranks)` converts bandwidth to bus bandwidth (nccl-tests, doc/PERFORMANCE.md). `crossing(ranks, nodes,
    ranks per node)` is the minimum number of times that S must leave or enter the busiest node.
    """

    name: str
    program: str
    bus_factor: Callable[[int], float]
    crossing: Callable[[int, int, int], float]
    reduces: bool = False
    has_root: bool = False
    in_parts: bool = False  # True if the column count refers to the part of one rank

    @property
    def reduction(self) -> str:
        """The value of the column redop."""
        return "sum" if self.reduces else "none"

    @property
    def root(self) -> int:
        """The value of the column root."""
        return 0 if self.has_root else -1

    def count(self, size_bytes: int, ranks: int) -> int:
        """Return the value of the column count: elements of all data, or of one rank's part."""
        return size_bytes // ELEMENT_BYTES // (ranks if self.in_parts else 1)

    def bus_limit(self, limit: Limit | None, ranks: int, nodes: int, on_node: int) -> float | None:
        """Return the bus bandwidth that a hardware limit allows, in GB/s."""
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
    """The out-of-place or in-place half of a row.

    time_us: mean over the iterations, for the slowest rank.
    median_us: median over the iterations, for the slowest rank.
    algbw_gb_per_s: size divided by time.
    busbw_gb_per_s: algbw times the bus factor of the operation.
    wrong: wrong elements on all ranks in an additional call that is checked.
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
        """Return the columns, calculated from the measured times."""
        bandwidth = size_bytes / mean_s / 1e9
        return cls(mean_s * 1e6, median_s * 1e6, bandwidth, bandwidth * operation.bus_factor(ranks), wrong)


@dataclass(frozen=True)
class Row:
    """The results at one size. A half is null if the operation lacks this form; `model_us` is null if not predicted."""

    size_bytes: int
    count: int
    out_of_place: Timing | None
    in_place: Timing | None
    model_us: float | None

    @property
    def halves(self) -> tuple[Timing, ...]:
        return tuple(half for half in (self.out_of_place, self.in_place) if half is not None)

    @property
    def usual(self) -> Timing:
        """The half that programs usually use: in place if possible."""
        return self.halves[-1]


@dataclass(frozen=True)
class Series:
    """One operation at all sizes, performed by `library` ("torch" or "mpi") and, with torch, by `algorithm`."""

    operation: str
    library: str
    algorithm: str
    busbw_limit_gb_per_s: float | None
    rows: tuple[Row, ...]

    @property
    def wrong(self) -> int:
        """The number of wrong elements in all rows."""
        return sum(half.wrong for row in self.rows for half in row.halves)

    @property
    def average_busbw_gb_per_s(self) -> float:
        """The mean over all halves of all rows, as in nccl-tests."""
        values = [half.busbw_gb_per_s for row in self.rows for half in row.halves]
        return math.fsum(values) / max(1, len(values))


@dataclass(frozen=True)
class RankPlace:
    """The location of a rank: `device` is its index on its host, `bus` the PCI address of its GPU, or 0x00."""

    rank: int
    pid: int
    host: str
    device: int
    bus: str
    name: str


@dataclass(frozen=True)
class Limit:
    """The bandwidth of the hardware in one direction: per rank (`of` is "rank"), or of all links of a node ("node")."""

    gb_per_s: float
    of: str
    source: str


@dataclass(frozen=True)
class Measurement:
    """All results of one measurement, and what it skipped."""

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
        return len({place.host for place in self.ranks})

    def title(self, series: Series) -> str:
        """Return the library and algorithm of a series: "gloo, ring" or "MPI"."""
        return "MPI" if series.library == "mpi" else f"{self.backend}, {series.algorithm}"

    def to_json(self) -> str:
        """Return the measurement as a JSON object on one line."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)


def sizes_of(operation: Operation, first_bytes: int, last_bytes: int, factor: int, ranks: int) -> tuple[int, ...]:
    """Return the sizes of an operation, from the first to the last, each `factor` times the previous one.

    If each rank has a part, the first size is rounded up so that the parts are equal and aligned as in nccl-tests.
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
        ToolkitError: the file is missing or invalid; the error names the key.
    """
    if not path.exists():
        raise NotFoundError(
            "no measurement of collectives found",
            where=str(path),
            fix="create a measurement with `toolkit run bench_collectives -n 2`",
        )
    found: Measurement = read_typed(
        read_json(path),
        Measurement,
        str(path),
        what="a measurement",
        fix="pass the output of `toolkit bench collectives --json` or the metrics file of a run, of this version",
    )
    return found
