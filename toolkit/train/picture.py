"""Draw the loss of a run."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from toolkit.errors import counted
from toolkit.metrics.training import TrainRecord, read_train_log


def draw_loss(log: Path, picture: Path) -> None:
    """Draw the loss over the steps as a PNG; a dashed line marks each new attempt.

    Raises:
        ImportError: matplotlib is not installed (the extra `plot`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_train_log(log)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lone = "o" if len(records) == 1 else None  # a line through a single point is invisible
    axes.plot([record.step for record in records], [record.loss for record in records], linewidth=1.4, marker=lone)
    for step, record in _takeovers(records):
        if step > 0:
            axes.axvline(step, color="0.4", linestyle="--", linewidth=1)
        axes.annotate(
            f"attempt {record.attempt}: {counted(record.world, 'rank')}",
            (step, 1), xycoords=("data", "axes fraction"),
            xytext=(4, -12), textcoords="offset points", fontsize=8, color="0.3",
        )  # fmt: skip
    first, last = records[0], records[-1]
    axes.set(xlabel="optimizer step", ylabel="mean loss of the global batch")
    axes.set_title(f"Training loss: {first.loss:.2f} to {last.loss:.2f} in {counted(last.step, 'step')}")
    axes.grid(alpha=0.3)
    axes.set_xlim(0, 1.01 * last.step)  # a label outside would shrink the axes
    figure.savefig(picture, dpi=120)


def _takeovers(records: list[TrainRecord]) -> Iterator[tuple[int, TrainRecord]]:
    """Yield the step from which each attempt resumed, and its first record."""
    yield 0, records[0]
    for before, after in pairwise(records):
        if after.attempt != before.attempt:
            yield before.step, after
