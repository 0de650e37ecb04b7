"""Names and numbers of nodes, devices and ranks: their order, their short forms, and notes about them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.topology.facts import NodeFacts

__all__ = ["short_ranges"]

_NAMED = 3  # names in a line, before it counts the others


def by_numbers(name: str) -> list[tuple[int, str]]:
    """A sort key that puts node2 before node10, and mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name)]


def first_named(names: Sequence[str]) -> str:
    """The first names, and the number of further ones."""
    listed = ", ".join(names[:_NAMED])
    return listed + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def short_ranges(numbers: Sequence[int]) -> list[str]:
    """Numbers in their order, those of equal distance in short form: "0-7", "0-30:2"."""
    parts = []
    start = 0
    while start < len(numbers):
        end = start + 1
        distance = numbers[end] - numbers[start] if end < len(numbers) else 0
        while end < len(numbers) and numbers[end] - numbers[end - 1] == distance:
            end += 1
        if end - start < 3:
            end = start + 1
            parts.append(str(numbers[start]))
        else:
            parts.append(f"{numbers[start]}-{numbers[end - 1]}" + (f":{distance}" if distance != 1 else ""))
        start = end
    return parts


class Notes:
    """Lines about a cluster, each once with the nodes that it applies to."""

    def __init__(self) -> None:
        self._hosts: dict[str, list[str]] = {}

    def add(self, line: str, node: NodeFacts | None = None) -> None:
        """Add a line about a node, or about the cluster."""
        hosts = self._hosts.setdefault(line, [])
        if node is not None:
            hosts.append(node.host.value or "a node without a name")

    def lines(self) -> list[str]:
        """The lines for people, such as "node1, node2: the leaf switch is unknown"."""
        return [f"{first_named(hosts)}: {line}" if hosts else line for line, hosts in self._hosts.items()]
