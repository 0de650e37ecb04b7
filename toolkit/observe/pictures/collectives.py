"""Draws measured collectives: time and bus bandwidth by size, with the model prediction and the hardware limit."""

import importlib
import textwrap
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.metrics.collectives import OPERATIONS, Measurement, Series
from toolkit.observe.pictures.formats import check_picture
from toolkit.units import format_bytes

__all__ = ["draw_measurement"]

# Colors that most color-blind people can distinguish: M. Okabe, K. Ito, "Color Universal Design" (2008).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8C6D1F", "#7F7F7F")
_MPI, _LIMIT = "#000000", "#B2182B"
_WIDTH, _ROW_HEIGHT, _DPI = 12.5, 3.7, 120  # width and row height in inches, dots per inch


def draw_measurement(measurement: Measurement, path: Path) -> None:
    """Draw two charts per operation with a legend at the right, in the image format given by the suffix of `path`.

    The charts show the variant that programs usually use, which is in place if the operation supports it.
    """
    check_picture(path)
    figures = importlib.import_module("matplotlib.figure")
    series = [one for one in measurement.series if one.rows]
    operations = list(dict.fromkeys(one.operation for one in series))
    if not operations:
        raise ToolkitError(
            "no measured sizes to draw", where=str(path), fix="run the measurement until at least one size is complete"
        )
    figure = figures.Figure(figsize=(_WIDTH, _ROW_HEIGHT * len(operations) + 0.4), dpi=_DPI, layout="constrained")
    figure.suptitle(_title(measurement), fontsize=11, weight="bold", ha="left", x=0.01)
    grid = figure.add_gridspec(len(operations), 3, width_ratios=(1, 1, 0.62))
    colors = _colors(series)
    for number, name in enumerate(operations):
        time, bandwidth, legend = (figure.add_subplot(grid[number, column]) for column in range(3))
        _draw_operation(measurement, [one for one in series if one.operation == name], colors, time, bandwidth)
        legend.axis("off")
        handles, labels = bandwidth.get_legend_handles_labels()
        legend.legend(handles, labels, loc="upper left", frameon=False, fontsize=8, borderaxespad=0)
    figure.savefig(path)


def _title(measurement: Measurement) -> str:
    ranks, nodes = len(measurement.ranks), measurement.nodes
    where = f"{ranks} ranks on {nodes} node{'s' * (nodes != 1)}"
    return f"Collectives of {where} ({measurement.ranks[0].name}), torch {measurement.torch}, {measurement.time[:10]}"


def _colors(series: list[Series]) -> dict[tuple[str, str], str]:
    """Return the color of each algorithm, the same in all rows."""
    ours = list(dict.fromkeys((one.library, one.algorithm) for one in series if one.library != "mpi"))
    return {key: _COLORS[number % len(_COLORS)] for number, key in enumerate(ours)} | {("mpi", ""): _MPI}


def _draw_operation(
    measurement: Measurement, series: list[Series], colors: dict[tuple[str, str], str], time: Any, bandwidth: Any
) -> None:
    operation = OPERATIONS[series[0].operation]
    factor = operation.bus_factor(len(measurement.ranks))
    for one in series:
        _draw_series(measurement, one, colors[one.library, one.algorithm], factor, time, bandwidth)
    for axes in (time, bandwidth):
        axes.plot([], [], color="0.4", linestyle=":", linewidth=1, label="median of the slowest rank")
    if any(row.model_us is not None for one in series for row in one.rows):
        bandwidth.plot([], [], color="0.4", linestyle="--", linewidth=1.2, label="model")
    limit = series[0].busbw_limit_gb_per_s
    if limit is not None and measurement.limit is not None:
        sizes = [row.size_bytes for row in max(series, key=lambda one: len(one.rows)).rows]
        time.plot(sizes, [size * factor / limit / 1e3 for size in sizes], color=_LIMIT, linewidth=1.2)
        label = f"limit {limit:.3g} GB/s: {measurement.limit.source}"
        bandwidth.axhline(limit, color=_LIMIT, linewidth=1.2, label="\n".join(textwrap.wrap(label, 40)))
    for axes, what in ((time, "time, µs"), (bandwidth, "bus bandwidth, GB/s")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda size, _place: format_bytes(size))
        axes.tick_params(labelsize=8)
        axes.set_xlabel("size of all data", fontsize=8)
        axes.set_ylabel(what, fontsize=8)
        axes.set_title(f"{operation.name}: {what.partition(',')[0]}", fontsize=10, loc="left")
        axes.grid(alpha=0.3)
    # Limit the axis, since the line of the hardware limit extends far below the measured times.
    time.set_ylim(bottom=min(row.usual.time_us for one in series for row in one.rows) / 4)


def _draw_series(
    measurement: Measurement, series: Series, color: str, factor: float, time: Any, bandwidth: Any
) -> None:
    sizes = [row.size_bytes for row in series.rows]
    means = [row.usual.time_us for row in series.rows]
    medians = [row.usual.median_us for row in series.rows]
    where = "in place" if series.rows[0].in_place else "out of place"
    measured = {"color": color, "linewidth": 1.4, "marker": "s" if series.library == "mpi" else "o", "markersize": 3}
    time.plot(sizes, means, **measured)
    bandwidth.plot(sizes, _bus(sizes, means, factor), label=f"{measurement.title(series)}, {where}", **measured)
    time.plot(sizes, medians, color=color, linestyle=":", linewidth=1)
    bandwidth.plot(sizes, _bus(sizes, medians, factor), color=color, linestyle=":", linewidth=1)
    predicted = [(row.size_bytes, row.model_us) for row in series.rows if row.model_us]
    if predicted:
        at, times = [size for size, _ in predicted], [us for _, us in predicted]
        time.plot(at, times, color=color, linestyle="--", linewidth=1.2)
        bandwidth.plot(at, _bus(at, times, factor), color=color, linestyle="--", linewidth=1.2)


def _bus(sizes: list[int], times_us: list[float], factor: float) -> list[float]:
    """Return the bus bandwidth in GB/s for each size."""
    return [size * factor / us / 1e3 for size, us in zip(sizes, times_us, strict=True)]
