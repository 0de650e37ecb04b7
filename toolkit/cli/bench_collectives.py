"""`toolkit bench collectives`: time collectives over the ranks of a launcher, or over ranks that it starts itself."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.options import RUN, echo_log, runs_option
from toolkit.errors import CheckFailedError, ToolkitError

if TYPE_CHECKING:
    from toolkit.comm.bench.request import BenchRequest
    from toolkit.config.resolved import ResolvedJob
    from toolkit.metrics.collectives import Measurement
    from toolkit.world.facts import World

_COLLECTIVES_JOB = "bench_collectives"
_OF_THE_TABLE = re.compile(r"#| *[0-9]+ +[0-9]+ +float ")
_OPTIONS = {"operations": "--operation", "algorithms": "--algorithm"}  # arguments whose option has a name of its own


@click.command()
@click.option(
    "--operation",
    "operations",
    default="all_reduce",
    metavar="NAMES",
    help="Collectives: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, send_recv, or all.",
)
@click.option("--ranks", type=int, metavar="N", help="Number of ranks to start [2, or those of the allocation].")
@click.option("--sizes", default="8..16M", metavar="FIRST..LAST", help="Sizes in bytes [8..16M]; K, M, G are binary.")
@click.option("--factor", default=2, help="Ratio of successive sizes [2].")
@click.option("--backend", default="auto", metavar="NAME", help="Backend: gloo, nccl, or auto (fits the device).")
@click.option("--mpi", is_flag=True, help="Also measure MPI's own collectives on the same memory.")
@click.option(
    "--algorithm",
    "algorithms",
    default="flat",
    metavar="NAMES",
    help="Algorithms of all_reduce: flat, ring, tree, ... (docs/collectives.md), or all [flat].",
)
@click.option("--iterations", default=20, help="Number of timed calls [20].")
@click.option("--warmup", default=5, help="Number of untimed calls before the timed ones [5].")
@click.option("--result", type=RUN, metavar="RUN", help="Print the stored result of a run or --json file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/bench.md lists the keys.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also draw a picture: .svg, .png or .pdf.")
@runs_option
def collectives(
    ranks: int | None, result: str | None, as_json: bool, output: Path | None, runs: Path | None, **arguments: Any
) -> None:
    """Time collectives over ranks, in the columns of nccl-tests, and check their results.

    If mpirun, srun or torchrun started this command, its ranks measure; else it starts ranks as `toolkit run` does.

    \b
    toolkit bench collectives --ranks 4 --algorithm all -o all_reduce.svg
    mpirun -n 4 toolkit bench collectives --operation all --mpi
    toolkit submit bench_collectives -N 4; toolkit bench collectives --result last
    """
    if output is not None:
        from toolkit.observe.pictures.formats import check_picture

        check_picture(output)
    code = 0
    if result is not None:
        found = _stored(result, runs)
        _print(found, as_json=as_json)
    else:
        request = _request(arguments)
        world = _started(request)
        if world is not None:
            found = _be_a_rank(world, request, ranks, as_json=as_json)
            if world.rank != 0:
                sys.exit(_wrong(found) > 0)
        else:
            found, code = _start(request, ranks, runs, as_json=as_json)
    if output is not None:
        _draw(found, output)
    if code:
        sys.exit(code)  # the run has reported why
    if wrong := _wrong(found):
        raise CheckFailedError(
            f"{wrong} elements of the results were wrong", fix="see the column #wrong; try fewer ranks, or one node"
        )


def _wrong(found: Measurement) -> int:
    return sum(series.wrong for series in found.series)


def _stored(result: str, runs: Path | None) -> Measurement:
    """Return the measurement in a run or file."""
    from toolkit.metrics.collectives import FILE, read_measurement
    from toolkit.rundir.files import typed_path
    from toolkit.runs.named_runs import find

    path = typed_path(result)
    return read_measurement(path if path.is_file() else find(result, runs).metrics / FILE)


def _print(found: Measurement, *, as_json: bool) -> None:
    from toolkit.metrics.collectives_table import lines_of

    if as_json:
        click.echo(found.to_json())
        return
    for line in lines_of(found):
        echo_log(line + "\n")


def _draw(found: Measurement, output: Path) -> None:
    from toolkit.observe.pictures.collectives import draw_measurement

    draw_measurement(found, output)
    click.echo(f"plot written to {output}", err=True)


def _request(arguments: dict[str, Any]) -> BenchRequest:
    """Return the request for these options; errors name the option, not the key."""
    from toolkit.comm.bench.request import BenchRequest

    try:
        return BenchRequest(**arguments)
    except ToolkitError as error:
        raise _by_option(error) from None


def _by_option(error: ToolkitError) -> ToolkitError:
    """Convert an error about a key of [args] to one about its option."""
    key = error.where.removeprefix("args.")
    if key != error.where:
        error.where = _OPTIONS.get(key, f"--{key}")
    return error


def _started(request: BenchRequest) -> World | None:
    """Return the world of a rank that a launcher started; None for a single process, which must start ranks itself."""
    from toolkit.world.discover import discover

    if request.backend == "gloo":  # hide the GPUs, whose number would limit the number of ranks
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    world = discover()
    if world.size == 1 and world.launcher in ("mpirun", "torchrun"):
        request.check_ranks(1)
    return world if world.size > 1 else None


def _be_a_rank(world: World, request: BenchRequest, ranks: int | None, *, as_json: bool) -> Measurement:
    """Measure together with the other ranks; rank 0 prints the results and the errors common to all ranks."""
    from toolkit.comm.bench.request import on_backend

    try:
        if ranks not in (None, world.size):
            raise ToolkitError(
                f"{world.launcher} has already started {world.size} ranks", where=f"--ranks {ranks}", fix="omit --ranks"
            )
        request.check_world(on_backend(world, request.backend))
        return _measure(world, request, as_json=as_json)
    except ToolkitError as error:
        if world.rank != 0 and type(error) is ToolkitError:
            sys.exit(error.exit_code)
        raise _by_option(error) from None


def _measure(world: World, request: BenchRequest, *, as_json: bool) -> Measurement:
    import torch.distributed as dist

    from toolkit.comm.bench.measure import measure
    from toolkit.metrics.collectives import FILE, write_measurement
    from toolkit.world.rendezvous import start_groups

    start_groups(world)
    found = measure(world, request, lambda line: click.echo(line, err=as_json))
    dist.barrier()  # rank 0 must not close the store while another rank needs it
    dist.destroy_process_group()
    if world.rank == 0:
        if world.run_dir is not None:
            write_measurement(world.run_dir / "metrics" / FILE, found)
        if as_json:
            click.echo(found.to_json())
    return found


def _start(request: BenchRequest, ranks: int | None, runs: Path | None, *, as_json: bool) -> tuple[Measurement, int]:
    """Run the shipped job in the foreground; return (its measurement, its exit code)."""
    from toolkit.config.request import JobRequest
    from toolkit.config.shipped import shipped_jobs
    from toolkit.metrics.collectives import FILE, read_measurement
    from toolkit.submission.batch_search import run_start
    from toolkit.submission.run_here import make_here, resolve_here

    try:
        if ranks is not None:
            request.check_ranks(ranks)
        asked = JobRequest(str(shipped_jobs()[_COLLECTIVES_JOB]), runs=runs, settings=_settings(request), ranks=ranks)
        resolved = resolve_here(asked)
        _check_job(request, resolved)
    except ToolkitError as error:
        raise _by_option(error) from None
    directory = make_here(asked, resolved)
    report = partial(click.echo, err=True)
    code = run_start(directory, resolved, 0, partial(echo_log, err=True) if as_json else _echo, report)
    path = directory.metrics / FILE
    if code and not path.exists():
        sys.exit(code)
    found = read_measurement(path)
    if as_json:
        click.echo(found.to_json())
    return found, code


def _check_job(request: BenchRequest, resolved: ResolvedJob) -> None:
    """Refuse a request that every rank would refuse."""
    from toolkit.world.device import visible_gpus

    job = resolved.job
    request.check_shape(job)
    # In an allocation, this host may lack the GPUs that the ranks will have on their nodes.
    if not os.environ.get("SLURM_JOB_ID"):
        request.check_gpus(visible_gpus(os.environ), job.ranks_per_node)


def _settings(request: BenchRequest) -> tuple[str, ...]:
    """Return the request as settings of the job."""
    arguments = dataclasses.asdict(request).items()
    settings = [f"args.{name}={json.dumps(value)}" for name, value in arguments]
    return (*settings, "env.vars.CUDA_VISIBLE_DEVICES=-1") if request.backend == "gloo" else tuple(settings)


def _echo(line: str) -> None:
    """Print rank 0's table on stdout, and other output of the ranks on stderr."""
    text = line.removeprefix("[0] ")
    if text != line and _OF_THE_TABLE.match(text):
        echo_log(text)
    else:
        echo_log(line, err=True)
