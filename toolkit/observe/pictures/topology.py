"""Writes the drawing of a topology to an image file with matplotlib."""

import importlib
from pathlib import Path
from typing import Any

from toolkit.observe.pictures.formats import check_picture
from toolkit.observe.pictures.topology_drawing import Box, Drawing, Wire

__all__ = ["save_picture"]

# Colors that most color-blind people can distinguish: M. Okabe, K. Ito, "Color Universal Design" (2008).
_LINKS = {
    "NVLink": ("#009E73", "NVLink (shaded: every pair has it)"), "PIX": ("#0072B2", "PIX: one PCIe switch"),
    "PXB": ("#56B4E9", "PXB: several PCIe switches"), "PHB": ("#E69F00", "PHB: the CPU's host bridge"),
    "NODE": ("#D55E00", "NODE: host bridges of one NUMA node"), "SYS": ("#999999", "SYS: between sockets"),
    "fabric": ("#333333", "network"),
}  # fmt: skip
_RAILS = ("#CC79A7", "#8DA0CB", "#FC8D62", "#A6D854", "#FFD92F", "#E5C494", "#66C2A5", "#B3B3B3")
_FACES = {
    "node": "#F7F7F7", "gpu": "#FFFFFF", "clique": "#BFE8DB", "fabric": "#E3F5EF", "leaf": "#DDDDDD",
    "unknown leaf": "#FFFFFF", "spine": "#DDDDDD", "more": "#FFFFFF", "words": "none",
}  # fmt: skip
_ORDER = {"fabric": 0, "node": 1, "clique": 2, "leaf": 3, "spine": 3}
_DPI = 130
_HEAD = 0.55  # the height of the title in inches


def save_picture(drawing: Drawing, path: Path) -> None:
    """Write the drawing in the image format given by the suffix of `path`.

    Raises:
        ToolkitError: see `check_picture`.
    """
    check_picture(path)
    figures = importlib.import_module("matplotlib.figure")
    legend = 0.5 + 0.17 * (max(len(_kinds(drawing)), min(drawing.rails, 8) / 2) + len(drawing.notes))
    width, height = max(drawing.width, 7.5), drawing.height + legend + _HEAD
    figure = figures.Figure(figsize=(width, height), dpi=_DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(-legend, drawing.height + _HEAD)
    axes.axis("off")
    axes.text(0.15, drawing.height + _HEAD - 0.12, drawing.title, fontsize=11, va="top", weight="bold")
    for box in drawing.boxes:
        _add_box(axes, box)
    for wire in drawing.wires:
        _add_wire(axes, wire)
    _add_legend(axes, drawing, legend)
    figure.savefig(path)


def _add_box(axes: Any, box: Box) -> None:
    patches = importlib.import_module("matplotlib.patches")
    face = _RAILS[box.rail % len(_RAILS)] if box.kind == "nic" else _FACES[box.kind]
    edge = {"clique": "none", "fabric": _LINKS["NVLink"][0], "words": "none"}.get(box.kind, "#555555")
    style = "--" if box.kind in ("more", "unknown leaf", "fabric") else "-"
    axes.add_patch(
        patches.FancyBboxPatch(
            (box.x, box.y), box.width, box.height, boxstyle="round,pad=0,rounding_size=0.04", facecolor=face,
            edgecolor=edge, linewidth=0.7, linestyle=style, zorder=_ORDER.get(box.kind, 5),
        )
    )  # fmt: skip
    if not box.label:
        return
    x, y, size = box.x + box.width / 2, box.y + box.height / 2, 6.5
    style_of_text: dict[str, Any] = {"ha": "center", "va": "center", "rotation": 90 if box.kind == "spine" else 0}
    if box.kind in ("node", "clique", "fabric"):
        # Put the label at the top, above the GPUs of a node or the rows of nodes.
        y = box.y + box.height - 0.05
        style_of_text["va"] = "top"
        if box.kind != "clique":
            x, size = box.x + 0.08, 8.0
            style_of_text["ha"] = "left"
    if box.kind in ("gpu", "nic"):
        # Fit the label: a character is about 0.6 of the font size wide, and an inch has 72 points.
        size = min(size, 72 * (box.width - 0.04) / (0.6 * len(box.label)))
    axes.text(x, y, box.label, fontsize=size, zorder=8, **style_of_text)


def _add_wire(axes: Any, wire: Wire) -> None:
    paths, patches = (importlib.import_module(f"matplotlib.{name}") for name in ("path", "patches"))
    (x, y), (end_x, end_y) = wire.start, wire.end
    points, codes = [(x, y), (end_x, end_y)], [paths.Path.MOVETO, paths.Path.LINETO]
    if wire.arc:
        # The top of a cubic Bezier curve is at three quarters of the height of its two control points.
        high = wire.arc / 0.75
        points[1:1] = [(x, y + high), (end_x, end_y + high)]
        codes = [paths.Path.MOVETO, *[paths.Path.CURVE4] * 3]
    width = 0.8 if wire.kind == "fabric" else 1.0 + 0.7 * min(wire.strength - 1, 3)
    color = _LINKS[wire.kind][0] if wire.kind in _LINKS else "#000000"
    axes.add_patch(
        patches.PathPatch(paths.Path(points, codes), facecolor="none", edgecolor=color, linewidth=width, zorder=4)
    )


def _kinds(drawing: Drawing) -> list[str]:
    """Return the kinds of links in the drawing, from near to far."""
    kinds = {wire.kind for wire in drawing.wires}
    if any(box.kind in ("clique", "fabric") for box in drawing.boxes):
        kinds.add("NVLink")
    return [kind for kind in _LINKS if kind in kinds]


def _add_legend(axes: Any, drawing: Drawing, height: float) -> None:
    """Add the legend below the picture: kinds of links at the left, rails at the right."""
    line = importlib.import_module("matplotlib.lines").Line2D
    style = {"loc": "upper left", "frameon": False, "fontsize": 7.5, "borderaxespad": 0.0}
    links = [line([], [], color=_LINKS[kind][0], linewidth=2, label=_LINKS[kind][1]) for kind in _kinds(drawing)]
    axes.add_artist(axes.legend(handles=links, bbox_to_anchor=(0.15, -0.2), bbox_transform=axes.transData, **style))
    rails = [
        line([], [], color=color, marker="s", linestyle="", label=f"NIC on rail {rail}")
        for rail, color in enumerate(_RAILS[: drawing.rails])
    ]
    if rails:
        axes.legend(handles=rails, bbox_to_anchor=(3.6, -0.2), bbox_transform=axes.transData, ncols=2, **style)
    for number, note in enumerate(drawing.notes):
        axes.text(0.15, -height + 0.1 + 0.2 * number, note, fontsize=8)
