"""The heat map of `watch`: the ranks that are slowest now, by time."""

import numpy as np
from rich.text import Text

from toolkit.observe.readings import RunReadings
from toolkit.observe.view import SCALE, view_of

__all__ = ["heat_of"]

ROWS = 16
_BLOCKS = {True: "▁▂▃▄▅▆▇█", False: ".:-=+*%#"}
_STYLES = ("dim", "dim", "", "", "", "yellow", "bold red", "bold red")


def heat_of(readings: RunReadings, width: int, *, unicode: bool) -> Text:
    """Return a line per rank, and a title; empty if there are no windows."""
    view = view_of(readings)
    if not view["heats"]:
        return Text()
    ((name, heat),) = view["heats"].items()
    hosts, low, high, cells = view["hosts"], heat["low"], heat["high"], np.array(heat["cells"], float)
    parts = np.array_split(np.where(cells < 0, np.nan, cells), max(1, min(cells.shape[1], width - 21)), axis=1)
    values = heat["least"] + np.stack([np.fmax.reduce(part, axis=1) for part in parts], axis=1) / SCALE * (
        heat["most"] - heat["least"]
    )
    worst = np.argsort(-np.nan_to_num(values[:, -len(parts) // 6 :]).mean(axis=1), kind="stable")[:ROWS]
    found = Text(f"{name} of the slowest {len(worst)} of {len(hosts)} ranks, {low:.3g} to {high:.3g} s")
    for row in sorted(worst):
        rank = row * heat["ranks_per_row"]
        found.append(f"\n{rank:>6} {hosts[rank][:12]:<12} ")
        for value in values[row]:
            level = -1 if np.isnan(value) else round(7 * min(1, max(0, (value - low) / (high - low))))
            found.append(" " if level < 0 else _BLOCKS[unicode][level], _STYLES[level])
    return found
