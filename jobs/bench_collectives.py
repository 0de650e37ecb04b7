"""Measure collectives between the ranks of this job, and print the columns of nccl-tests.

`toolkit bench collectives` runs it on this host and plots the result. `toolkit submit bench_collectives -N 4` runs it
on a cluster, and `toolkit bench collectives --result last -o picture.svg` plots that result. Copy this file to
measure other shapes.
"""

from __future__ import annotations

from toolkit.comm.bench.measure import measure
from toolkit.comm.bench.request import BenchRequest
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError
from toolkit.metrics.collectives import FILE, write_measurement
from toolkit.train.arguments import read_arguments
from toolkit.world.facts import World


def main(world: World, config: ResolvedJob) -> None:
    """Measure; rank 0 prints the table and writes it to the metrics of the run."""
    found = measure(world, read_arguments(BenchRequest, config.args), lambda line: print(line, flush=True))
    if world.rank == 0 and world.run_dir is not None:
        write_measurement(world.run_dir / "metrics" / FILE, found)
    if wrong := sum(series.wrong for series in found.series):
        raise CheckFailedError(
            f"{wrong} elements of the collective results are wrong",
            where="collectives",
            fix="see the column #wrong; measure fewer ranks or single nodes until you find the faulty node",
        )
