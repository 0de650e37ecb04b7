"""Lays out a topology as boxes and wires, in inches from the lower left corner, without matplotlib.

A leaf consists of one or more rows of nodes, each above a bar for the leaf switch. A line at the left connects the
leaves. NVLink cliques are shaded, behind the GPUs of a node, or behind the rows if they span nodes.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from toolkit.topology.facts import NO_FABRIC, Hardware, NodeFacts, Topology, contradictions
from toolkit.topology.links.matrix import NearestNics
from toolkit.topology.links.nodes import cliques_of, links_within, nearest_nics_of

__all__ = ["draw"]

MOST_NODES = 72  # for a larger cluster, only the first nodes of each group are drawn
FIRST_NODES = 2
MOST_GROUPS = 16
WIDEST = 21.0  # the maximum width of a row of nodes

GPU_WIDTH, GPU_HEIGHT = 0.46, 0.26
GAP = 0.10  # the gap between neighboring devices
NODE_GAP = 0.30
MARGIN = 0.16  # the margin inside a node
BOTTOM = 0.10  # the margin below the NICs of a node
TITLE = 0.24  # the height of the title of a node
NIC_HEIGHT = 0.24
WIRES = 0.42  # the distance between GPUs and NICs
DROP = 0.26  # the distance from NICs to the bar of the leaf
BAR = 0.20
LEFT = 1.0  # the width for the line that connects leaves
ROW_GAP = 0.40

_Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle; `kind` is node, gpu, nic, clique, fabric, leaf, unknown leaf, spine, more or words (text only)."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    label: str = ""
    rail: int = 0  # the rail of a NIC


@dataclass(frozen=True)
class Wire:
    """A line, or an arc of height `arc`; `kind` is the kind of link, `strength` the number of NVLinks."""

    kind: str
    start: _Point
    end: _Point
    strength: int = 1
    arc: float = 0.0


@dataclass
class Drawing:
    """The parts of a drawing; `rails` is the largest number of NICs in a node."""

    title: str
    boxes: list[Box] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0
    rails: int = 0
    notes: list[str] = field(default_factory=list)


def draw(topology: Topology, title: str) -> Drawing:
    """Return the layout of a topology."""
    drawing = Drawing(title)
    groups = _groups(topology)
    is_whole = len(topology.nodes) <= MOST_NODES
    shown = groups if is_whole else groups[:MOST_GROUPS]
    if len(shown) < len(groups):
        drawing.notes.append(f"and {len(groups) - len(shown)} more leaves or NVLink cliques")
    y = 0.0
    bars: dict[Hashable, list[float]] = {}
    # Draw from the bottom, the last group first, so that the first group is at the top.
    for leaf, fabric, nodes in reversed(shown):
        kept = nodes if is_whole else nodes[:FIRST_NODES]
        bottom, right = y, LEFT
        rows = _rows(kept)
        for row in reversed(rows):
            omitted = len(nodes) - len(kept) if row is rows[-1] else 0
            height, row_right = _draw_row(drawing, row, y, leaf, omitted)
            bars.setdefault(leaf, []).append(y + BAR / 2)
            right = max(right, row_right)
            y += height + ROW_GAP
        if fabric is not None:
            pad, height = 0.12, y - ROW_GAP - bottom
            label = f"NVLink clique of {len(nodes)} nodes"
            frame = Box("fabric", LEFT - pad, bottom - pad, right - LEFT + 2 * pad, height + pad + 0.28, label)
            drawing.boxes.insert(0, frame)
            y += 0.30
    _join_leaves(drawing, bars)
    drawing.width = max([box.x + box.width for box in drawing.boxes], default=LEFT) + 0.2
    drawing.height = y - ROW_GAP
    return drawing


def _groups(topology: Topology) -> list[tuple[str | None, str | None, list[NodeFacts]]]:
    """Return (leaf, multi-node NVLink clique, nodes) for each group; None for an unknown leaf or an absent clique."""
    labels = [_fabric(node) for node in topology.nodes]
    members = Counter(labels)
    groups: dict[tuple[str | None, str | None], list[NodeFacts]] = {}
    for node, label in zip(topology.nodes, labels, strict=True):
        path = node.switches.value
        groups.setdefault((path.leaf if path else None, label if members[label] > 1 else None), []).append(node)
    order = {leaf: place for place, leaf in enumerate(dict.fromkeys(leaf for leaf, _ in groups))}
    return [(leaf, fabric, nodes) for (leaf, fabric), nodes in sorted(groups.items(), key=lambda one: order[one[0][0]])]


def _fabric(node: NodeFacts) -> str | None:
    """Return the label of the NVLink fabric that all GPUs of a node share, or None if there is none."""
    labels = {fact.value for fact in node.gpu_fabrics}
    label = labels.pop() if len(labels) == 1 else None
    return None if label == NO_FABRIC else label


def _node_width(node: NodeFacts) -> float:
    devices = max(len(node.hardware.gpus), len(node.hardware.nics.value or ()), 3)
    return devices * (GPU_WIDTH + GAP) - GAP + 2 * MARGIN


def _rows(nodes: list[NodeFacts]) -> list[list[NodeFacts]]:
    """Split nodes into rows of about equal length, none wider than `WIDEST`."""
    most = max(1, int(WIDEST / (max(_node_width(node) for node in nodes) + NODE_GAP)))
    rows = -(-len(nodes) // most)
    each = -(-len(nodes) // rows)
    return [nodes[at : at + each] for at in range(0, len(nodes), each)]


def _draw_row(
    drawing: Drawing, nodes: list[NodeFacts], y: float, leaf: str | None, omitted: int
) -> tuple[float, float]:
    """Draw a row of nodes above its bar; return (height, right end)."""
    x, heights = LEFT, []
    base = y + BAR + DROP
    for node in nodes:
        heights.append(_draw_node(drawing, node, x, base, y + BAR if leaf is not None else None))
        x += _node_width(node) + NODE_GAP
    if omitted:
        drawing.boxes.append(Box("more", x, base, 1.2, max(heights), f"and {omitted}\nmore nodes"))
        x += 1.2 + NODE_GAP
    kind, label = ("leaf", f"leaf switch {leaf}") if leaf is not None else ("unknown leaf", "leaf switch unknown")
    drawing.boxes.append(Box(kind, LEFT, y, x - NODE_GAP - LEFT, BAR, label))
    return BAR + DROP + max(heights), x - NODE_GAP


def _draw_node(drawing: Drawing, node: NodeFacts, x: float, y: float, bar: float | None) -> float:
    """Draw a node with its lower left corner at (x, y); return its height."""
    hardware, width = node.hardware, _node_width(node)
    gpu_y = y + BOTTOM + NIC_HEIGHT + WIRES
    step = GPU_WIDTH + GAP
    first = x + (width - (len(hardware.gpus) * step - GAP)) / 2
    at = {gpu.label: (first + place * step, gpu_y) for place, gpu in enumerate(hardware.gpus)}
    height = _draw_links(drawing, hardware, at, gpu_y) - y + TITLE
    drawing.boxes.append(Box("node", x, y, width, height, _title(node)))
    _draw_cliques(drawing, hardware, at)
    drawing.boxes += [Box("gpu", *corner, GPU_WIDTH, GPU_HEIGHT, label) for label, corner in at.items()]
    inner = width - 2 * MARGIN
    if not at:
        label = "no GPU" if hardware.gpu_count.value == 0 else "GPUs unknown"
        drawing.boxes.append(Box("words", x + MARGIN, gpu_y, inner, GPU_HEIGHT, label))
    if not hardware.nics.value:
        label = "NICs unknown" if hardware.nics.value is None else "no NIC with RDMA"
        drawing.boxes.append(Box("words", x + MARGIN, y + BOTTOM, inner, NIC_HEIGHT, label))
    _draw_nics(drawing, hardware, at, (x, y, width), bar)
    return height


def _draw_nics(
    drawing: Drawing, hardware: Hardware, at: dict[str, _Point], node: tuple[float, float, float], bar: float | None
) -> None:
    """Draw NICs, the wires to their nearest GPUs, and the wires to the bar of the leaf."""
    x, y, width = node
    nics = [nic.name for nic in hardware.nics.value or ()]
    nearest = {hardware.gpus[place].label: found for place, found in nearest_nics_of(hardware).items()}
    nic_at = _below_their_gpus(nics, nearest, at, x, width)
    drawing.rails = max(drawing.rails, len(nics))
    for rail, nic in enumerate(nics):
        drawing.boxes.append(Box("nic", nic_at[nic], y + BOTTOM, GPU_WIDTH, NIC_HEIGHT, nic, rail))
        if bar is not None:
            middle = nic_at[nic] + GPU_WIDTH / 2
            drawing.wires.append(Wire("fabric", (middle, y + BOTTOM), (middle, bar)))
    for gpu, found in nearest.items():
        start = (at[gpu][0] + GPU_WIDTH / 2, at[gpu][1])
        for nic in found.nics:
            if nic in nic_at:
                end = (nic_at[nic] + GPU_WIDTH / 2, y + BOTTOM + NIC_HEIGHT)
                drawing.wires.append(Wire(found.level, start, end))


def _below_their_gpus(
    nics: list[str], nearest: dict[str, NearestNics], at: dict[str, _Point], x: float, width: float
) -> dict[str, float]:
    """Return the left ends of the NICs, each centered below its nearest GPUs, and moved so that NICs do not overlap."""
    wanted = {}
    for nic in nics:
        above = [at[gpu][0] for gpu, found in nearest.items() if nic in found.nics and found.level != "SYS"]
        wanted[nic] = sum(above) / len(above) if above else x + width
    order = sorted(nics, key=lambda nic: (wanted[nic], nics.index(nic)))
    left = {nic: wanted[nic] for nic in order}
    step, low, high = GPU_WIDTH + GAP, x + MARGIN, x + width - MARGIN - GPU_WIDTH
    for place, nic in enumerate(order):  # leave space for the NICs to the left
        left[nic] = max(left[nic], low + place * step)
    for place, nic in reversed(list(enumerate(order))):
        after = order[place + 1] if place + 1 < len(order) else None
        left[nic] = min(left[nic], left[after] - step if after else high)
    return left


def _title(node: NodeFacts) -> str:
    count = len(contradictions(node))
    return f"{node.host.value or '?'}" + (f"  ({count} contradiction{'s' * (count > 1)})" if count else "")


def _uniform(links: list[str | None]) -> str | None:
    """Return the link that all pairs have, or None if links differ or one is unknown."""
    return links[0] if links and links[0] and len(set(links)) == 1 else None


def _draw_links(drawing: Drawing, hardware: Hardware, at: dict[str, _Point], gpu_y: float) -> float:
    """Draw arcs for links between GPUs, except in uniform cliques; return the height of the highest arc."""
    if not at:
        return gpu_y + GPU_HEIGHT + 1.2  # the height of a node with GPUs
    inside = {
        frozenset((hardware.gpus[one].label, hardware.gpus[other].label))
        for group in cliques_of(hardware)
        if len(group) > 2 and _uniform(links_within(hardware, group))
        for one in group
        for other in group
    }
    bottom = gpu_y + GPU_HEIGHT
    top = bottom + (0.30 if inside else 0.10)
    for link in hardware.links:
        value = link.link.value
        if value is None or value in ("SYS", "NODE", "PHB", "X"):
            continue
        for one, other in link.pairs:
            if one not in at or other not in at or frozenset((one, other)) in inside:
                continue
            left, right = sorted((at[one][0] + GPU_WIDTH / 2, at[other][0] + GPU_WIDTH / 2))
            arc = 0.12 + 0.13 * round((right - left) / (GPU_WIDTH + GAP))
            kind = "NVLink" if value.startswith("NV") else value
            strength = int(value[2:]) if value[2:].isdigit() else 1
            drawing.wires.append(Wire(kind, (left, bottom), (right, bottom), strength, arc))
            top = max(top, bottom + arc + 0.06)
    return top


def _draw_cliques(drawing: Drawing, hardware: Hardware, at: dict[str, _Point]) -> None:
    for group in cliques_of(hardware):
        corners = [at[hardware.gpus[place].label] for place in group]
        left, right = min(corners)[0], max(corners)[0] + GPU_WIDTH
        if right - left > len(group) * (GPU_WIDTH + GAP):
            continue  # other GPUs are between them, so only the arcs show the clique
        uniform = _uniform(links_within(hardware, group))
        label = f"NVLink clique, {uniform}" if uniform and len(group) > 2 else ""
        pad = GAP * 0.45
        height = GPU_HEIGHT + 2 * pad + (0.2 if label else 0.0)
        drawing.boxes.append(Box("clique", left - pad, corners[0][1] - pad, right - left + 2 * pad, height, label))


def _join_leaves(drawing: Drawing, bars: dict[Hashable, list[float]]) -> None:
    """Draw a line to the left of each leaf with several rows, and a line further left that connects the leaves."""
    known = {leaf: heights for leaf, heights in bars.items() if leaf is not None}
    rail, spine = LEFT - 0.3, LEFT - 0.6
    for heights in known.values():
        if len(heights) > 1 or len(known) > 1:
            drawing.wires += [Wire("fabric", (rail, height), (LEFT, height)) for height in heights]
            drawing.wires.append(Wire("fabric", (rail, min(heights)), (rail, max(heights))))
    middles = [(min(heights) + max(heights)) / 2 for heights in known.values()]
    if len(middles) > 1:
        drawing.wires += [Wire("fabric", (spine, middle), (rail, middle)) for middle in middles]
        low, high = min(middles) - 0.2, max(middles) + 0.2
        drawing.boxes.append(Box("spine", LEFT - 0.85, low, 0.25, high - low, "cluster"))
