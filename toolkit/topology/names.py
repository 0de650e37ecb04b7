"""Sort and shorten names and numbers of nodes, devices and ranks, and collect notes about nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.topology.facts import NodeFacts

__all__ = ["short_ranges"]

_NAMED = 3  # number of names in a line, before the number of further ones


def by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts node2 before node10, and mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name)]


def first_named(names: Sequence[str]) -> str:
    """Return the first names and the number of further ones, such as "n1, n2, n3 and 5 more"."""
    listed = ", ".join(names[:_NAMED])
    return listed + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def short_ranges(numbers: Sequence[int]) -> list[str]:
    """Return numbers in their order, with runs of equal steps shortened, such as "0-7" and "0-30:2"."""
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
    """Notes about a cluster; a note that applies to several nodes is listed once, with all of them."""

    def __init__(self) -> None:
        self._hosts: dict[str, list[str]] = {}

    def add(self, line: str, node: NodeFacts | None = None) -> None:
        """Add a note about a node, or about the whole cluster if no node is given."""
        hosts = self._hosts.setdefault(line, [])
        if node is not None:
            hosts.append(node.host.value or "a node without a name")

    def lines(self) -> list[str]:
        """Return the notes for display, such as "node1, node2: the leaf switch is unknown"."""
        return [f"{first_named(hosts)}: {line}" if hosts else line for line, hosts in self._hosts.items()]
