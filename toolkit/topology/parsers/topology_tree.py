"""Slurm's switches as a tree, and in what their records contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Switch:
    """One switch. `nodes` and `children` are () where the record lists none, None where the list cannot be read."""

    name: str
    line: int
    topology: str
    nodes: tuple[str, ...] | None
    children: tuple[str, ...] | None
    level: int | None  # as printed


@dataclass(frozen=True)
class Block:
    """One block of nodes; `most_nodes` is what `BlockSize` allows."""

    name: str
    line: int
    topology: str
    nodes: tuple[str, ...] | None
    index: int | None
    most_nodes: int | None


@dataclass(frozen=True)
class Tree:
    """Which switch lies below which. `levels` is None where they form a ring."""

    roots: tuple[str, ...]
    undefined: tuple[str, ...]
    heights: Mapping[str, int | None]  # 0 for a leaf

    @property
    def levels(self) -> int | None:
        known = [height for height in self.heights.values() if height is not None]
        return max(known) + 1 if len(known) == len(self.heights) else None


@dataclass(frozen=True)
class SlurmTopology:
    """What is said of a cluster's switches and blocks, in the order of the records."""

    switches: tuple[Switch, ...]
    blocks: tuple[Block, ...]
    other_lines: tuple[str, ...]

    @cached_property
    def tree(self) -> Tree:
        below = {switch.name: switch.children or () for switch in self.switches}
        named = dict.fromkeys(child for children in below.values() for child in children)
        heights: dict[str, int | None] = {}
        for name in below:
            _height(name, below, heights)
        return Tree(
            roots=tuple(name for name in below if name not in named),
            undefined=tuple(child for child in named if child not in below),
            heights=heights,
        )

    @cached_property
    def nodes_on_two_leaves(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node for node, _, _ in _on_two(self._leaves)))

    @property
    def _leaves(self) -> list[Switch]:
        return [switch for switch in self.switches if switch.children == ()]


def contradictions(topology: SlurmTopology) -> list[str]:
    """Warnings where records do not fit each other."""
    switches = {switch.name: switch for switch in reversed(topology.switches)}
    return [
        *_seen_twice(topology.switches, "switch"),
        *_seen_twice(topology.blocks, "block"),
        *(
            f"line {second.line}: {node} is listed by {first.name}, too"
            for entries in (topology._leaves, topology.blocks)
            for node, first, second in _on_two(entries)
        ),
        *_not_below(topology.switches, switches),
        *_other_level(topology, switches),
        *_alone(topology),
        *_other_nodes(topology.switches, switches),
        *_of_blocks(topology.blocks),
    ]


def _height(name: str, below: Mapping[str, Sequence[str]], heights: dict[str, int | None]) -> None:
    """Put down how far a switch stands above its lowest leaf, without recursion: a damaged file may be deep."""
    stack = [name]
    while stack:
        here = stack[-1]
        if here in heights and heights[here] is not None:
            stack.pop()
            continue
        heights[here] = None
        children = [child for child in below[here] if child in below]
        unknown = [child for child in children if child not in heights]
        if unknown:
            stack.extend(unknown)
            continue
        known = [heights[child] for child in children]
        numbers = [height for height in known if height is not None]
        # A child that is being reckoned itself lies above: a ring.
        heights[here] = (
            1 + max(numbers, default=0 if children or below[here] else -1) if len(numbers) == len(known) else None
        )
        stack.pop()


def _on_two(entries: Sequence[Switch] | Sequence[Block]) -> Iterator[tuple[str, Switch | Block, Switch | Block]]:
    """(node, the first that lists it, another one that does)."""
    holders: dict[tuple[str, str], Switch | Block] = {}
    for entry in entries:
        for node in entry.nodes or ():
            first = holders.setdefault((entry.topology, node), entry)
            if first is not entry and first.name != entry.name:
                yield node, first, entry


def _seen_twice(entries: Sequence[Switch] | Sequence[Block], sort: str) -> Iterator[str]:
    first: dict[tuple[str, str], int] = {}
    for entry in entries:
        line = first.setdefault((entry.topology, entry.name), entry.line)
        if line != entry.line:
            yield f"line {entry.line}: {sort} {entry.name} has a record on line {line}, too"


def _not_below(entries: Sequence[Switch], switches: Mapping[str, Switch]) -> Iterator[str]:
    above: dict[tuple[str, str], Switch] = {}
    for switch in entries:
        for child in switch.children or ():
            if child not in switches:
                yield f"line {switch.line}: {child} below {switch.name} has no record"
            first = above.setdefault((switch.topology, child), switch)
            if first.name != switch.name:
                yield f"line {switch.line}: {child} stands below {switch.name} and below {first.name}"


def _other_level(topology: SlurmTopology, switches: Mapping[str, Switch]) -> Iterator[str]:
    heights = topology.tree.heights
    for switch in topology.switches:
        height = heights[switch.name]
        if height is None:
            yield f"line {switch.line}: {switch.name} stands in or above a ring of switches"
        elif switch.level not in (None, height) and all(child in switches for child in switch.children or ()):
            yield f"line {switch.line}: {switch.name} has Level={switch.level}, but {height} levels stand below it"


def _alone(topology: SlurmTopology) -> Iterator[str]:
    """scontrol gives the levels, and a switch that stands alone while others of its level do not has lost its parent."""
    named = {child for switch in topology.switches for child in switch.children or ()}
    levels = {switch.level for switch in topology.switches if switch.name in named and switch.level is not None}
    for switch in topology.switches:
        if switch.name not in named and switch.level in levels:
            yield f"line {switch.line}: {switch.name} stands below no switch, unlike others of Level={switch.level}"


def _other_nodes(entries: Sequence[Switch], switches: Mapping[str, Switch]) -> Iterator[str]:
    """scontrol prints for each switch all nodes below it."""
    for switch in entries:
        children = [switches[child] for child in switch.children or () if child in switches]
        if not switch.nodes or not children or len(children) != len(switch.children or ()):
            continue
        lists = [child.nodes for child in children]
        below = {node for nodes in lists for node in nodes or ()}
        if all(lists) and below != set(switch.nodes):
            differing = sorted(below ^ set(switch.nodes))
            yield f"line {switch.line}: {switch.name} and the switches below it list other nodes: {', '.join(differing[:5])}"


def _of_blocks(blocks: Sequence[Block]) -> Iterator[str]:
    last: Block | None = None
    for block in blocks:
        if block.nodes and block.most_nodes is not None and len(block.nodes) > block.most_nodes:
            yield f"line {block.line}: {block.name} lists {len(block.nodes)} nodes, BlockSize is {block.most_nodes}"
        if last and block.index is not None and last.index is not None and block.index <= last.index:
            yield f"line {block.line}: BlockIndex={block.index} does not follow {last.index}"
        last = block
