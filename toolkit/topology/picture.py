"""A drawing of a topology as a picture file, by matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.topology.drawing import Box, Drawing

SUFFIXES = (".svg", ".png", ".pdf")
# Colours that stay apart for most colour-blind eyes: M. Okabe, K. Ito, "Color Universal Design" (2008).
LINK_COLOURS = {
    "NVLink": "#009E73", "PIX": "#0072B2", "PXB": "#56B4E9", "PHB": "#E69F00", "NODE": "#D55E00", "SYS": "#999999",
    "fabric": "#333333",
}  # fmt: skip
_MEANINGS = {
    "NVLink": "NVLink (shaded: every pair has it)", "PIX": "PIX: one PCIe switch", "PXB": "PXB: several PCIe switches",
    "PHB": "PHB: the CPU's host bridge", "NODE": "NODE: host bridges of one NUMA node", "SYS": "SYS: between sockets",
    "fabric": "network",
}  # fmt: skip
_RAILS = ("#CC79A7", "#8DA0CB", "#FC8D62", "#A6D854", "#FFD92F", "#E5C494", "#66C2A5", "#B3B3B3")
_FACES = {
    "node": "#F7F7F7", "gpu": "#FFFFFF", "clique": "#BFE8DB", "fabric": "#E3F5EF", "leaf": "#DDDDDD",
    "unknown leaf": "#FFFFFF", "spine": "#DDDDDD", "more": "#FFFFFF", "words": "none",
}  # fmt: skip
_ORDER = {"fabric": 0, "node": 1, "clique": 2, "leaf": 3, "spine": 3}
_DPI = 130


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be written, before anything is laid out for it.

    Raises:
        ToolkitError: the name has another ending or is a folder's, its folder is not there, or matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ToolkitError(
            f"{path.suffix or 'no ending'} is no picture that is known",
            where=str(path),
            fix=f"end the name with {', '.join(SUFFIXES)}",
        )
    if path.is_dir():
        raise ToolkitError("is a folder", where=str(path), fix=f"name a file in it: {path / f'topology{path.suffix}'}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ToolkitError("its folder is not there", where=str(path), fix=f"mkdir -p {folder}, or name another")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ToolkitError(
            "matplotlib is not installed", where="topo plot", fix="pip install 'toolkit[plot]'"
        ) from error


def save_picture(drawing: Drawing, path: Path) -> None:
    """Write the picture; the file's name says of which kind.

    Raises:
        ToolkitError: see `check_picture`.
    """
    check_picture(path)
    figures = importlib.import_module("matplotlib.figure")
    legend = 0.5 + 0.17 * (max(len(_kinds(drawing)), min(drawing.rails, 8) / 2) + len(drawing.notes))
    head = 0.55
    width, height = max(drawing.width, 7.5), drawing.height + legend + head
    figure = figures.Figure(figsize=(width, height), dpi=_DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(-legend, drawing.height + head)
    axes.axis("off")
    axes.text(0.15, drawing.height + head - 0.12, drawing.title, fontsize=11, va="top", weight="bold")
    for box in drawing.boxes:
        _add_box(axes, box)
    for wire in drawing.wires:
        _add_wire(axes, wire)
    _add_legend(axes, drawing, legend)
    figure.savefig(path)


def _add_box(axes: Any, box: Box) -> None:
    patches = importlib.import_module("matplotlib.patches")
    face = _RAILS[box.rail % len(_RAILS)] if box.kind == "nic" else _FACES[box.kind]
    edge = {"clique": "none", "fabric": LINK_COLOURS["NVLink"], "words": "none"}.get(box.kind, "#555555")
    style = "--" if box.kind in ("more", "unknown leaf", "fabric") else "-"
    axes.add_patch(
        patches.FancyBboxPatch(
            (box.x, box.y), box.width, box.height, boxstyle="round,pad=0,rounding_size=0.04", facecolor=face,
            edgecolor=edge, linewidth=0.7, linestyle=style, zorder=_ORDER.get(box.kind, 5),
        )
    )  # fmt: skip
    if not box.label:
        return
    middle, size = box.x + box.width / 2, 6.5
    place: dict[str, Any] = {"x": middle, "y": box.y + box.height / 2, "ha": "center", "va": "center"}
    if box.kind in ("node", "clique", "fabric"):
        # In the upper left corner, where a node's GPUs and rows of nodes leave room.
        place |= {"y": box.y + box.height - 0.05, "va": "top"}
        if box.kind != "clique":
            place |= {"x": box.x + 0.08, "ha": "left"}
            size = 8.0
    if box.kind == "spine":
        place["rotation"] = 90
    if box.kind in ("gpu", "nic"):
        # A letter is some 0.6 of its height wide; 72 points are an inch.
        size = min(size, 72 * (box.width - 0.04) / (0.6 * len(box.label)))
    axes.text(place.pop("x"), place.pop("y"), box.label, fontsize=size, zorder=8, **place)


def _add_wire(axes: Any, wire: Any) -> None:
    paths, patches = (importlib.import_module(f"matplotlib.{name}") for name in ("path", "patches"))
    (x, y), (end_x, end_y) = wire.start, wire.end
    if wire.arc:
        # A cubic curve rises to three quarters of the height of its two middle points.
        high = wire.arc / 0.75
        points = [(x, y), (x, y + high), (end_x, end_y + high), (end_x, end_y)]
        codes = [paths.Path.MOVETO, paths.Path.CURVE4, paths.Path.CURVE4, paths.Path.CURVE4]
    else:
        points, codes = [(x, y), (end_x, end_y)], [paths.Path.MOVETO, paths.Path.LINETO]
    width = 0.8 if wire.kind == "fabric" else 1.0 + 0.7 * min(wire.strength - 1, 3)
    axes.add_patch(
        patches.PathPatch(
            paths.Path(points, codes), facecolor="none", edgecolor=LINK_COLOURS.get(wire.kind, "#000000"),
            linewidth=width, zorder=4,
        )
    )  # fmt: skip


def _kinds(drawing: Drawing) -> list[str]:
    """The kinds of links that are drawn, from near to far."""
    kinds = {wire.kind for wire in drawing.wires}
    if any(box.kind in ("clique", "fabric") for box in drawing.boxes):
        kinds.add("NVLink")
    return [kind for kind in LINK_COLOURS if kind in kinds]


def _add_legend(axes: Any, drawing: Drawing, height: float) -> None:
    """What the colours mean, below the picture: kinds of links at the left, rails at the right."""
    lines = importlib.import_module("matplotlib.lines")
    handles = [
        lines.Line2D([], [], color=LINK_COLOURS[kind], linewidth=2, label=_MEANINGS[kind]) for kind in _kinds(drawing)
    ]
    place = {"loc": "upper left", "frameon": False, "fontsize": 7.5, "borderaxespad": 0.0}
    first = axes.legend(handles=handles, bbox_to_anchor=(0.15, -0.2), bbox_transform=axes.transData, **place)
    axes.add_artist(first)
    rails = [
        lines.Line2D([], [], color=_RAILS[rail % len(_RAILS)], marker="s", linestyle="", label=f"NIC on rail {rail}")
        for rail in range(min(drawing.rails, len(_RAILS)))
    ]
    if rails:
        axes.legend(handles=rails, bbox_to_anchor=(3.6, -0.2), bbox_transform=axes.transData, ncols=2, **place)
    for number, note in enumerate(drawing.notes):
        axes.text(0.15, -height + 0.1 + 0.2 * number, note, fontsize=8)
