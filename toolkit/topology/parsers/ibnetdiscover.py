"""Read `ibnetdiscover`: switches, adapters and routers of an InfiniBand fabric, and the links between their ports.

Each link is printed twice, once from each end, and a node's GUID on two lines, so that damage shows. What the command
prints is in infiniband-diags/ibnetdiscover.c of rdma-core.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from toolkit.topology.parsers.fabric_lines import Line, read_lines, strange

KEYS = {
    "switch_lines": "how many switches are printed",
    "ca_lines": "how many channel adapters are printed; one node may have several",
}
ID_LINE = re.compile(
    r"(vendid|devid|sysimgguid|switchguid|caguid|rtguid)=0x([0-9a-f]{1,16})(?:\([0-9a-f]{1,16}\))?(?:\s*#.*)?"
)
NODE_LINE = re.compile(
    r'(Switch|Ca|Rt)\s+([0-9]{1,5}) "([SHR])-([0-9a-f]{16})"\s+# "([^"]*)"(?: (?:base|enhanced) port 0 lid ([0-9]+) lmc [0-9]+)?'
    r"(?: \(scp\))?"
)
LINK_LINE = re.compile(
    r"\[([0-9]{1,5})\](?:\[ext [0-9]+\])?(?:\(([0-9a-f]{1,16})\))?\s+"
    r'"[SHR]-([0-9a-f]{16})"\[([0-9]{1,5})\](?:\[ext [0-9]+\])?\s*(?:\([0-9a-f]{1,16}\))?\s+'
    r'# (?:lid ([0-9]+) lmc [0-9]+ )?"([^"]*)" lid ([0-9]+) ([0-9]{1,2}x[A-Z0-9]+)(?: [swv(].*| slot [0-9]+)*'
)
# -l, -H, -S and -R print a line for each node, without its links.
LIST_LINE = re.compile(
    r'(Switch|Ca|Router|Rt)\s*: (?:\{ )?0x([0-9a-f]{16}) ports ([0-9]{1,5}) devid 0x[0-9a-f]+ vendid 0x[0-9a-f]+(?: \})? "(.*)"'
    r"(?: (?:base|enhanced) port 0 lid ([0-9]+) lmc [0-9]+)?"
)
HEADING = re.compile(r"# (Topology file: generated on|Initiated from node) (.+)")
DATE = re.compile("[A-Z][a-z]{2} [A-Z][a-z]{2} +[0-9]{1,2} [0-9:]{8} [0-9]{4}")
COMMENT = re.compile(
    r"#|# (Reported max hops discovered|Total MADs used): [0-9]+|# (Spine Nodes|Line Nodes|Chassis Switches|Chassis CAs)"
    r"|Chassis [0-9]+( \(guid 0x[0-9a-f]+\))?|Non-Chassis Nodes|Hostname: .*"
)
EVIDENCE = re.compile(
    r'(?:^|(?<=\s))(?:(?:Switch|Ca|Rt)\s+[0-9]+ "|(?:Switch|Ca|Router)\s*: (?:\{ )?0x|(?:switch|ca)guid=0x)'
)
_LETTERS = {"Switch": "S", "Ca": "H", "Rt": "R"}


@dataclass(frozen=True)
class Link:
    """One end of a cable: `port` of this node leads to `remote_port` of the node `remote_guid`."""

    port: int
    remote_guid: int
    remote_port: int
    remote_lid: int
    width_and_speed: str


@dataclass(frozen=True)
class FabricNode:
    """A switch, an adapter or a router; `port_count` is what it has, `links` those of them that lead somewhere.

    `kind` is "Switch", "Ca" or "Rt", `lid` that of a switch. All but the kind is None where its line is damaged.
    """

    kind: str
    guid: int | None
    port_count: int | None
    description: str | None
    lid: int | None
    links: tuple[Link, ...]


@dataclass
class _Node:
    """A node whose lines are being read."""

    line: int
    kind: str
    guid: int | None = None
    port_count: int | None = None
    description: str | None = None
    lid: int | None = None
    links: list[tuple[Link, int]] = field(default_factory=list)


def parse_ibnetdiscover(text: str) -> tuple[tuple[FabricNode, ...], tuple[str, ...]]:
    """Read the whole output: (nodes in printed order, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of ibnetdiscover.
    """
    warnings: list[str] = []
    reader = _Reader(warnings)
    for line in read_lines(text, EVIDENCE, "ibnetdiscover", warnings, prompts=False):
        reader.read(line)
    reader.finish()
    nodes = [
        FabricNode(one.kind, one.guid, one.port_count, one.description, one.lid, tuple(link for link, _ in one.links))
        for one in reader.nodes
    ]
    return tuple(nodes), tuple(warnings)


def answer_ibnetdiscover(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of ibnetdiscover: (values of `KEYS`, warnings).

    Raises:
        CheckFailedError: it is no output of ibnetdiscover.
    """
    nodes, warnings = parse_ibnetdiscover(text)
    kinds = [node.kind for node in nodes]
    return {"switch_lines": kinds.count("Switch"), "ca_lines": kinds.count("Ca")}, warnings


class _Reader:
    """The lines in their order: headings, then for each node its ids, its own line and its links."""

    def __init__(self, warnings: list[str]) -> None:
        self.nodes: list[_Node] = []
        self._warnings = warnings
        self._ids: dict[str, tuple[int, int]] = {}  # value and line, of the node whose line is still to come
        self._headings: dict[str, tuple[str, int]] = {}
        self._listed = False

    def read(self, line: Line) -> None:
        if match := LINK_LINE.fullmatch(line.text):
            self._link(match, line)
        elif match := ID_LINE.fullmatch(line.text):
            if match[1] in self._ids:
                self._warn(line.number, f"{match[1]} is printed a second time")
            self._ids[match[1]] = int(match[2], 16), line.number
        elif match := LIST_LINE.fullmatch(line.text):
            self._listed = True
            kind = "Rt" if match[1] == "Router" else match[1]
            lid = int(match[5]) if match[5] else None
            self.nodes.append(_Node(line.number, kind, int(match[2], 16), int(match[3]), match[4], lid))
        elif match := NODE_LINE.fullmatch(line.text):
            self._node(match, line)
        elif match := re.match(r"(Switch|Ca|Rt)\b", line.text):
            self._warn(line.number, f"no node can be read from {line.text[:60]!r}")
            self.nodes.append(_Node(line.number, match[1]))
            self._ids.clear()
        elif match := HEADING.fullmatch(line.text):
            if match[1] in self._headings:
                self._warn(line.number, f"{match[1]!r} is printed a second time")
            self._headings[match[1]] = match[2], line.number
        elif not COMMENT.fullmatch(line.text):
            self._warnings.append(strange(line, "the topology"))

    def finish(self) -> None:
        """What the lines say against each other."""
        self._no_ids_without_node()
        self._check_headings()
        self._check_nodes()
        if not self._listed:
            self._check_links()

    def _node(self, match: re.Match[str], line: Line) -> None:
        kind, guid = match[1], int(match[4], 16)
        node = _Node(line.number, kind, guid, int(match[2]), match[5], int(match[6]) if match[6] else None)
        if _LETTERS[kind] != match[3]:
            self._warn(line.number, f"a {kind} has no name that begins with {match[3]}")
        own = f"{kind.lower()}guid"
        missing = [name for name in ("vendid", "devid", own) if name not in self._ids]
        if missing:
            self._warn(line.number, f"{kind} {match[4]} is printed without {', '.join(missing)}")
        elif self._ids[own][0] != guid:
            self._warn(line.number, f"{match[4]} is not the {own} of line {self._ids[own][1]}; it is not read")
            node.guid = None
        if kind == "Switch" and match[6] is None:
            self._warn(line.number, f"the lid of switch {match[4]} is missing")
        self.nodes.append(node)
        self._ids.clear()

    def _link(self, match: re.Match[str], line: Line) -> None:
        self._no_ids_without_node()
        if not self.nodes:
            self._warn(line.number, "a link of no node; it is not read")
            return
        node = self.nodes[-1]
        link = Link(int(match[1]), int(match[3], 16), int(match[4]), int(match[7]), match[8])
        if node.links and link == node.links[-1][0]:
            self._warn(line.number, f"port {link.port} is printed a second time")
            return
        if node.links and link.port <= node.links[-1][0].port:
            self._warn(line.number, f"port {link.port} behind port {node.links[-1][0].port}")
        if node.port_count is not None and link.port > node.port_count:
            self._warn(line.number, f"port {link.port} of a node with {node.port_count} ports")
        node.links.append((link, line.number))

    def _no_ids_without_node(self) -> None:
        if self._ids:
            self._warn(max(number for _, number in self._ids.values()), "no Switch, Ca or Rt follows; a line is lost")
        self._ids.clear()

    def _check_headings(self) -> None:
        if self._listed:
            return
        for what in ("Topology file: generated on", "Initiated from node"):
            if what not in self._headings:
                self._warn(1, f"no heading {what!r}")
        date, number = self._headings.get("Topology file: generated on", ("", 0))
        if date and not DATE.fullmatch(date):
            self._warn(number, f"no date can be read from {date[:60]!r}")
        origin, number = self._headings.get("Initiated from node", ("", 0))
        if match := re.match("([0-9a-f]{16}) port [0-9a-f]{16}$", origin):
            if int(match[1], 16) not in [node.guid for node in self.nodes]:
                self._warn(number, f"the node {match[1]} is not printed")
        elif origin:
            self._warn(number, f"no node can be read from {origin[:60]!r}")

    def _check_nodes(self) -> None:
        seen: dict[int, int] = {}
        for node in self.nodes:
            if node.guid in seen:
                self._warn(node.line, f"the node of line {seen[node.guid]} is printed a second time")
            elif node.guid is not None:
                seen[node.guid] = node.line
            if not node.links and not self._listed:
                self._warn(node.line, "no link of this node is printed")

    def _check_links(self) -> None:
        """Each link must be printed from its other end, too, with the same width and speed, and the lid of the switch."""
        ends = {(node.guid, link.port): (link, node.lid) for node in self.nodes if node.guid for link, _ in node.links}
        printed = {node.guid: node.lid for node in self.nodes if node.guid}
        beyond: list[int] = []
        for node in self.nodes:
            for link, number in node.links if node.guid else ():
                back = ends.get((link.remote_guid, link.remote_port))
                if link.remote_guid not in printed:
                    beyond.append(number)
                elif back is None or (back[0].remote_guid, back[0].remote_port) != (node.guid, link.port):
                    self._warn(number, f"the other end of port {link.port} does not lead back to it")
                elif back[0].width_and_speed != link.width_and_speed:
                    self._warn(number, f"{link.width_and_speed} here, {back[0].width_and_speed} at the other end")
                elif printed[link.remote_guid] not in (None, link.remote_lid):
                    self._warn(number, f"lid {link.remote_lid} of a node with lid {printed[link.remote_guid]}")
        if beyond:
            self._warn(beyond[0], f"{len(beyond)} links lead to nodes that are not printed, this one first")

    def _warn(self, number: int, what: str) -> None:
        self._warnings.append(f"line {number}: {what}")
