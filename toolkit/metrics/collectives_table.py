"""Format a measurement of collectives like nccl-tests, whose output many programs parse. Standard library only.

The measuring code prints the lines during the measurement: `head`, a `line` for each row, `foot`.
"""

from collections.abc import Iterator

from toolkit.metrics.collectives import OPERATIONS, Measurement, Row, Series, Timing, sizes_of

__all__ = ["foot", "head", "left_out", "line", "lines_of"]

_UNSTEADY = 2.0  # a larger ratio of mean to median is not caused by the collective itself
_WIDTH = 5 + 12 + 2 + 12 + 2 + 8 + 2 + 6 + 2 + 6


def lines_of(measurement: Measurement) -> Iterator[str]:
    """Yield the lines of all series, each in the format of an nccl-tests program."""
    for series in measurement.series:
        yield from head(measurement, series)
        for row in series.rows:
            yield line(series, row)
        yield from foot(series)
    yield from left_out(measurement)


def head(measurement: Measurement, series: Series) -> Iterator[str]:
    """Yield the lines above the rows of `series`."""
    operation = OPERATIONS[series.operation]
    how = f"{measurement.title(series)} ({measurement.mpi})" if series.library == "mpi" else measurement.title(series)
    sizes = sizes_of(
        operation, measurement.first_bytes, measurement.last_bytes, measurement.factor, len(measurement.ranks)
    )
    yield f"# Collective test starting: {operation.program}"
    yield f"# toolkit {measurement.toolkit}: {series.operation} by {how}; torch {measurement.torch}"
    yield "# time: the mean of the slowest rank, as nccl-tests prints with -a 3"
    yield (
        f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {measurement.last_bytes} step: {measurement.factor}(factor) "
        f"warmup iters: {measurement.warmup} iters: {measurement.iterations} agg iters: 1 validation: 1 graph: 0"
    )
    yield "#"
    yield "# Using devices"
    for place in measurement.ranks:
        yield (
            f"#  Rank {place.rank:2d} Group  0 Pid {place.pid:6d} on {place.host:>10} "
            f"device {place.device:2d} [{place.bus}] {place.name}"
        )
    yield "#"
    halves = 2 if has_both(series) else 1
    yield f"#{'':{_WIDTH}}   out-of-place{'                       in-place' * (halves - 1)}"
    yield f"#{'size':>11}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}" + (
        f"  {'time':>7}  {'algbw':>6}  {'busbw':>6} {'#wrong':>6}" * halves
    )
    yield f"#{'(B)':>11}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}" + (
        f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6} {'':>6}" * halves
    )


def has_both(series: Series) -> bool:
    """Return True if the operation has both forms, out of place and in place; most operations have only one."""
    return series.library == "mpi" or series.operation in ("all_reduce", "broadcast")


def line(series: Series, row: Row) -> str:
    """Return the line of one row."""
    operation = OPERATIONS[series.operation]
    halves = "".join(_half(half) for half in row.halves)
    return (
        f"{row.size_bytes:12d}  {row.count:12d}  {'float':>8}  {operation.reduction:>6}  {operation.root:6d}" + halves
    )


def _half(timing: Timing) -> str:
    decimals = 0 if timing.time_us >= 10_000 else 1 if timing.time_us >= 100 else 2
    return f"  {timing.time_us:7.{decimals}f}  {timing.algbw_gb_per_s:6.2f}  {timing.busbw_gb_per_s:6.2f} {timing.wrong:6d}"


def foot(series: Series) -> Iterator[str]:
    """Yield the lines below the rows."""
    yield f"# Out of bounds values : {series.wrong} {'FAILED' if series.wrong else 'OK'}"
    yield f"# Avg bus bandwidth    : {series.average_busbw_gb_per_s:g}"
    halves = [half for row in series.rows for half in row.halves]
    if unsteady := sum(half.time_us > _UNSTEADY * half.median_us for half in halves):
        yield f"# Unsteady: {unsteady} of {len(halves)} times are more than {_UNSTEADY:g} times their median (--json)"
    yield "#"
    yield f"# Collective test concluded: {OPERATIONS[series.operation].program}"


def left_out(measurement: Measurement) -> Iterator[str]:
    """Yield a line for everything that was requested but not measured."""
    for words in measurement.left_out:
        yield f"# Skipped: {words}"
