"""Where everything of a topology stands on a picture, in inches from the lower left: boxes, wires and words.

A leaf is a row of nodes, or several, each above a bar of the leaf's switch. Next to the bars stands the line that joins
leaves. NVLink cliques are shaded: inside a node behind its GPUs, across nodes behind the rows. Without matplotlib here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from toolkit.topology.facts import NO_FABRIC, NodeFacts, Topology, contradictions
from toolkit.topology.links import NearestNics
from toolkit.topology.node_links import cliques_of, links_within, nearest_nics_of

MOST_NODES = 72  # that are all drawn; of a larger cluster the first ones of each group
FIRST_NODES = 2
MOST_GROUPS = 16
WIDEST = 21.0  # inches of nodes in a row

GPU_WIDTH, GPU_HEIGHT = 0.46, 0.26
GAP = 0.10  # between neighbours
MARGIN = 0.16  # inside a node
TITLE = 0.24  # of a node
NIC_HEIGHT = 0.24
WIRES = 0.42  # between GPUs and NICs
DROP = 0.26  # from NICs to the leaf's bar
BAR = 0.20
LEFT = 1.0  # for the line that joins leaves, and its words
ROW_GAP = 0.40


@dataclass(frozen=True)
class Box:
    """A rectangle; `kind` is what it is: node, gpu, nic, clique, fabric, leaf, more. NICs have the number of their rail."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    label: str = ""
    rail: int = 0


@dataclass(frozen=True)
class Wire:
    """A line, or an arc of some height; `kind` is the kind of link, `strength` the NVLinks on it."""

    kind: str
    start: tuple[float, float]
    end: tuple[float, float]
    strength: int = 1
    arc: float = 0.0


@dataclass
class Drawing:
    """All of a picture; `rails` is how many NICs the node with the most has."""

    title: str
    boxes: list[Box] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0
    rails: int = 0
    notes: list[str] = field(default_factory=list)


def kind_of(link: str) -> str:
    """The kind of a link: NV12 is NVLink."""
    return "NVLink" if link.startswith("NV") else link


def draw(topology: Topology, title: str) -> Drawing:
    """Lay a topology out."""
    drawing = Drawing(title)
    groups = _groups(topology)
    total = len(topology.nodes)
    shown = groups if total <= MOST_NODES else groups[:MOST_GROUPS]
    if len(shown) < len(groups):
        drawing.notes.append(f"and {len(groups) - len(shown)} more leaves or NVLink cliques")
    y = 0.0
    bars: dict[Hashable, list[float]] = {}
    # From below: the last group first, so that the first one stands at the top.
    for leaf, fabric, nodes in reversed(shown):
        kept = nodes if total <= MOST_NODES else nodes[:FIRST_NODES]
        bottom = y
        rows = _rows(kept)
        right = LEFT
        for number, row in reversed(list(enumerate(rows))):
            left_out = len(nodes) - len(kept) if number == len(rows) - 1 else 0
            height, width = _draw_row(drawing, row, y, leaf, left_out)
            bars.setdefault(leaf, []).append(y + BAR / 2)
            right = max(right, width)
            y += height + ROW_GAP
        if fabric is not None:
            pad = 0.12
            frame = Box(
                "fabric", LEFT - pad, bottom - pad, right - LEFT + 2 * pad, y - ROW_GAP - bottom + pad + 0.28,
                f"NVLink clique of {len(nodes)} nodes",
            )  # fmt: skip
            drawing.boxes.insert(0, frame)
            y += 0.30
    _join_leaves(drawing, bars)
    drawing.width = max([box.x + box.width for box in drawing.boxes], default=LEFT) + 0.2
    drawing.height = y - ROW_GAP
    return drawing


def _groups(topology: Topology) -> list[tuple[str | None, str | None, list[NodeFacts]]]:
    """Nodes by leaf and NVLink clique across nodes: (leaf, clique, nodes), None where unknown or none."""
    fabrics: dict[int, str | None] = {}
    for number, node in enumerate(topology.nodes):
        told = {fact.value for fact in node.gpu_fabrics}
        label = told.pop() if len(told) == 1 else None
        fabrics[number] = None if label == NO_FABRIC else label
    members = Counter(fabrics.values())
    found: dict[tuple[str | None, str | None], list[NodeFacts]] = {}
    for number, node in enumerate(topology.nodes):
        fabric = fabrics[number] if members[fabrics[number]] > 1 else None
        path = node.switches.value
        found.setdefault((path.leaf if path else None, fabric), []).append(node)
    order = {leaf: place for place, leaf in enumerate(dict.fromkeys(leaf for leaf, _ in found))}
    return [(leaf, fabric, nodes) for (leaf, fabric), nodes in sorted(found.items(), key=lambda one: order[one[0][0]])]


def node_width(node: NodeFacts) -> float:
    """Inches of a node's box."""
    devices = max(len(node.hardware.gpus), len(node.hardware.nics.value or ()), 3)
    return devices * (GPU_WIDTH + GAP) - GAP + 2 * MARGIN


def _rows(nodes: list[NodeFacts]) -> list[list[NodeFacts]]:
    """Nodes in rows of about equal length, none wider than the paper."""
    widest = max(node_width(node) for node in nodes) + 0.3
    most = max(1, int(WIDEST / widest))
    rows = -(-len(nodes) // most)
    each = -(-len(nodes) // rows)
    return [nodes[at : at + each] for at in range(0, len(nodes), each)]


def _draw_row(
    drawing: Drawing, nodes: list[NodeFacts], y: float, leaf: str | None, left_out: int
) -> tuple[float, float]:
    """Draw a row of nodes above its bar; (height, right end)."""
    x, heights = LEFT, []
    base = y + BAR + DROP
    for node in nodes:
        heights.append(_draw_node(drawing, node, x, base, y + BAR if leaf is not None else None))
        x += node_width(node) + 0.3
    if left_out:
        drawing.boxes.append(Box("more", x, base, 1.2, max(heights), f"and {left_out}\nmore nodes"))
        x += 1.5
    label = f"leaf switch {leaf}" if leaf is not None else "leaf switch unknown"
    drawing.boxes.append(Box("leaf" if leaf is not None else "unknown leaf", LEFT, y, x - 0.3 - LEFT, BAR, label))
    return BAR + DROP + max(heights), x - 0.3


def _draw_node(drawing: Drawing, node: NodeFacts, x: float, y: float, bar: float | None) -> float:
    """Draw a node with its lower left corner at (x, y); its height."""
    hardware, width = node.hardware, node_width(node)
    gpus = [gpu.label for gpu in hardware.gpus]
    nics = [nic.name for nic in hardware.nics.value or ()]
    nearest = nearest_nics_of(hardware)
    gpu_y = y + 0.10 + NIC_HEIGHT + WIRES
    at = {name: (place, gpu_y) for name, place in zip(gpus, _spread(len(gpus), x, width), strict=True)}
    nic_at = _below_their_gpus(nics, {gpus[place]: found for place, found in nearest.items()}, at, x, width)
    top = _draw_links(drawing, node, at)
    height = top - y + TITLE
    drawing.boxes.append(Box("node", x, y, width, height, _title(node)))
    _draw_cliques(drawing, node, at)
    for name, (left, bottom) in at.items():
        drawing.boxes.append(Box("gpu", left, bottom, GPU_WIDTH, GPU_HEIGHT, name))
    if not gpus:
        counted = "no GPU" if hardware.gpu_count.value == 0 else "GPUs unknown"
        drawing.boxes.append(Box("words", x + MARGIN, gpu_y, width - 2 * MARGIN, GPU_HEIGHT, counted))
    if not nics:
        counted = "NICs unknown" if hardware.nics.value is None else "no NIC with RDMA"
        drawing.boxes.append(Box("words", x + MARGIN, y + 0.10, width - 2 * MARGIN, NIC_HEIGHT, counted))
    for rail, nic in enumerate(nics):
        drawing.rails = max(drawing.rails, rail + 1)
        drawing.boxes.append(Box("nic", nic_at[nic], y + 0.10, GPU_WIDTH, NIC_HEIGHT, nic, rail))
        if bar is not None:
            middle = nic_at[nic] + GPU_WIDTH / 2
            drawing.wires.append(Wire("fabric", (middle, y + 0.10), (middle, bar)))
    for place, found in nearest.items():
        for nic in found.nics:
            if nic in nic_at:
                start = (at[gpus[place]][0] + GPU_WIDTH / 2, gpu_y)
                drawing.wires.append(Wire(found.level, start, (nic_at[nic] + GPU_WIDTH / 2, y + 0.10 + NIC_HEIGHT)))
    return height


def _spread(count: int, x: float, width: float) -> list[float]:
    """Left ends of so many boxes, evenly in a node."""
    step = GPU_WIDTH + GAP
    first = x + (width - (count * step - GAP)) / 2
    return [first + number * step for number in range(count)]


def _below_their_gpus(
    nics: list[str], nearest: dict[str, NearestNics], at: dict[str, tuple[float, float]], x: float, width: float
) -> dict[str, float]:
    """Left ends of the NICs: each in the middle of the GPUs that it is nearest to, pushed aside by its neighbours."""
    wanted = {}
    for nic in nics:
        above = [at[gpu][0] for gpu, found in nearest.items() if nic in found.nics and found.level != "SYS"]
        wanted[nic] = sum(above) / len(above) if above else x + width
    order = sorted(nics, key=lambda nic: (wanted[nic], nics.index(nic)))
    found = {nic: wanted[nic] for nic in order}
    step, low, high = GPU_WIDTH + GAP, x + MARGIN, x + width - MARGIN - GPU_WIDTH
    for place, nic in enumerate(order):  # none so far left that those before it have no room
        found[nic] = max(found[nic], low + place * step)
    for place, nic in reversed(list(enumerate(order))):
        after = order[place + 1] if place + 1 < len(order) else None
        found[nic] = min(found[nic], found[after] - step if after else high)
    return found


def _title(node: NodeFacts) -> str:
    said = len(contradictions(node))
    return f"{node.host.value or '?'}" + (f"  ({said} contradiction{'s' * (said > 1)})" if said else "")


def _uniform(links: list[str | None]) -> str | None:
    """The one link that all pairs have."""
    return links[0] if links and links[0] and len(set(links)) == 1 else None


def _draw_links(drawing: Drawing, node: NodeFacts, at: dict[str, tuple[float, float]]) -> float:
    """Draw arcs between GPUs, other than in cliques of one kind of link, and SYS; the height of the highest."""
    hardware = node.hardware
    inside = {
        frozenset((hardware.gpus[one].label, hardware.gpus[other].label))
        for group in cliques_of(hardware)
        if len(group) > 2 and _uniform(links_within(hardware, group))
        for one in group
        for other in group
        if one != other
    }
    gpu_y = next(iter(at.values()))[1] if at else 0.0
    bottom = gpu_y + GPU_HEIGHT
    top = bottom + (0.30 if inside or not at else 0.10)
    drawn = [
        (one, other, link.link.value)
        for link in hardware.links
        if link.link.value not in (None, "SYS", "NODE", "PHB", "X")
        for one, other in link.pairs
        if one in at and other in at and frozenset((one, other)) not in inside
    ]
    for one, other, value in drawn:
        assert value is not None
        ends = sorted((at[one][0] + GPU_WIDTH / 2, at[other][0] + GPU_WIDTH / 2))
        steps = round((ends[1] - ends[0]) / (GPU_WIDTH + GAP))
        arc = 0.12 + 0.13 * steps
        strength = int(value[2:]) if value[2:].isdigit() else 1
        drawing.wires.append(Wire(kind_of(value), (ends[0], bottom), (ends[1], bottom), strength, arc))
        top = max(top, bottom + arc + 0.06)
    if not at:
        # As high as a node with GPUs has its words.
        return top + 0.9
    return top


def _draw_cliques(drawing: Drawing, node: NodeFacts, at: dict[str, tuple[float, float]]) -> None:
    hardware = node.hardware
    for group in cliques_of(hardware):
        left = min(at[hardware.gpus[place].label][0] for place in group)
        right = max(at[hardware.gpus[place].label][0] for place in group) + GPU_WIDTH
        bottom = at[hardware.gpus[group[0]].label][1]
        uniform = _uniform(links_within(hardware, group))
        neighbours = len(group) * (GPU_WIDTH + GAP) - GAP
        if right - left > neighbours + GAP:
            continue  # others stand between them; the arcs tell
        label = f"NVLink clique, {uniform}" if uniform and len(group) > 2 else ""
        pad = GAP * 0.45
        drawing.boxes.append(
            Box(
                "clique",
                left - pad,
                bottom - pad,
                right - left + 2 * pad,
                GPU_HEIGHT + 2 * pad + (0.2 if label else 0.0),
                label,
            )
        )


def _join_leaves(drawing: Drawing, bars: dict[Hashable, list[float]]) -> None:
    """A line at the left for each leaf of several rows, and one further left that joins leaves."""
    middles = []
    known = {leaf: heights for leaf, heights in bars.items() if leaf is not None}
    for heights in known.values():
        if len(heights) > 1 or len(known) > 1:
            for height in heights:
                drawing.wires.append(Wire("fabric", (LEFT - 0.3, height), (LEFT, height)))
            drawing.wires.append(Wire("fabric", (LEFT - 0.3, min(heights)), (LEFT - 0.3, max(heights))))
        middles.append((min(heights) + max(heights)) / 2)
    if len(middles) > 1:
        for middle in middles:
            drawing.wires.append(Wire("fabric", (LEFT - 0.6, middle), (LEFT - 0.3, middle)))
        drawing.boxes.append(
            Box("spine", LEFT - 0.85, min(middles) - 0.2, 0.25, max(middles) - min(middles) + 0.4, "cluster")
        )
