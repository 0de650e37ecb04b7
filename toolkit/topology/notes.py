"""What is unknown of a cluster, in lines: each once, with the nodes that it holds for."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.topology.facts import NodeFacts

_NAMED = 3  # of the things that a line tells, before it counts the others


class Notes:
    """Collects lines in their order."""

    def __init__(self) -> None:
        self._hosts: dict[str, list[str]] = {}

    def add(self, line: str, node: NodeFacts | None = None) -> None:
        """Say it of a node, or of the cluster."""
        hosts = self._hosts.setdefault(line, [])
        if node is not None:
            hosts.append(node.host.value or "a node without a name")

    def lines(self) -> list[str]:
        """For people: "node1, node2: the leaf switch is unknown"."""
        return [f"{first_named(hosts)}: {line}" if hosts else line for line, hosts in self._hosts.items()]


def first_named(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    said = ", ".join(names[:_NAMED])
    return said + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
