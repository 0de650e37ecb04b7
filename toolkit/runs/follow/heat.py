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
    labels = [
        f"{rank:>6} {view['hosts'][rank][:12]:<12} " for rank in range(0, len(view["hosts"]), heat["ranks_per_row"])
    ]
    cells = np.array(heat["cells"], float)
    parts = np.array_split(np.where(cells < 0, np.nan, cells), min(cells.shape[1], width - 20), axis=1)
    shown = np.stack([np.fmax.reduce(part, axis=1) for part in parts], axis=1) / SCALE * (heat["most"] - heat["least"])
    shares = np.clip((shown + heat["least"] - heat["low"]) / (heat["high"] - heat["low"]), 0, 1)
    worst = sorted(np.argsort(-np.nan_to_num(shares[:, -len(parts) // 6 :]).mean(axis=1), kind="stable")[:ROWS])
    found = Text(
        f"{name} by rank, {heat['low']:.3g} to {heat['high']:.3g} s; the slowest {len(worst)} of {len(view['hosts'])} ranks"
    )
    for row in worst:
        found.append(f"\n{labels[row]}")
        for share in shares[row]:
            level = 0 if np.isnan(share) else round(share * 7)
            found.append(" " if np.isnan(share) else _BLOCKS[unicode][level], _STYLES[level])
    return found
