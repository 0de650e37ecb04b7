"""Read Slurm's switches and blocks: `scontrol show topology`, and the files topology.conf and topology.yaml.

One record stands on one line, `SwitchName=leaf1 Nodes=n[1-4]`, whatever the case of its keys; topology.yaml says the same
on several lines. Which switch lies below which is taken from the records, not from `Level=`, which is compared with it.
"""

from __future__ import annotations

import re
from typing import Any

from toolkit.errors import CheckFailedError, ToolkitError
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.topology.parsers.lines import Line, lines_of
from toolkit.topology.parsers.topology_records import Record, records_of_lines
from toolkit.topology.parsers.topology_tree import Block, SlurmTopology, Switch, contradictions
from toolkit.topology.parsers.topology_yaml import is_yaml, records_of_yaml

KEYS = {
    "switch_count": "how many switches have a record",
    "block_count": "how many blocks have a record",
    "other_lines": "lines that are no record, no comment and no setting",
    "leaf_switches": "each switch that lists nodes itself, and how many, null where they cannot be read; scontrol lists "
    "them for a higher switch, too. null without switches",
    "roots": "switches that no switch names as below it, null without switches",
    "levels": "how many switches stand above each other, null without switches or where they form a ring",
    "node_count": "how many nodes are listed, each once; null where a list cannot be read",
    "nodes_on_two_leaves": "nodes that two switches list that have no switch below, null without switches",
    "undefined_child_switches": "switches that another one names as below it and that have no record, null without switches",
    "single_tree": "true when there is one root, null without switches",
}
_NO_TOPOLOGY = "no topology information available"  # what scontrol says with topology/flat


def parse_slurm_topology(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output or file: (values of `KEYS`, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it names no switch and no block.
    """
    topology, warnings = read_slurm_topology(text)
    return answer(topology), warnings


def read_slurm_topology(text: str) -> tuple[SlurmTopology, tuple[str, ...]]:
    """Every switch and block in the order of their records, and warnings that name the damaged lines.

    Raises:
        CheckFailedError: it names no switch and no block.
    """
    lines, cut = lines_of(text)
    records, others, problems = (records_of_yaml if is_yaml(lines) else records_of_lines)(lines)
    told = [line for line in lines if line.text.strip()]
    if not records and not (told and all(_NO_TOPOLOGY in line.text.lower() for line in told)):
        first = told[0] if told else Line(1, "")
        raise CheckFailedError(
            f"no switch and no block: {first.text.strip()[:60]!r}", where=f"line {first.number}"
        )  # fmt: skip
    if not records:
        others = ()
    warnings = [*problems, *(f"line {line.number}: no record: {line.text.strip()[:60]!r}" for line in others)]
    topology = SlurmTopology(
        switches=tuple(_switch(record, warnings) for record in records if not record.is_block),
        blocks=tuple(_block(record, warnings) for record in records if record.is_block),
        other_lines=tuple(line.text.strip() for line in others),
    )
    warnings += contradictions(topology)
    return topology, (*sorted(warnings, key=_line_of), *cut)


def answer(topology: SlurmTopology) -> dict[str, Any]:
    """The values of `KEYS`."""
    tree = topology.tree
    listed = [switch.nodes for switch in topology.switches] + [block.nodes for block in topology.blocks]
    known = [nodes for nodes in listed if nodes is not None]
    facts = {
        "switch_count": len(topology.switches),
        "block_count": len(topology.blocks),
        "other_lines": list(topology.other_lines),
        "node_count": len(set().union(*known)) if len(known) == len(listed) else None,
    }
    if not topology.switches:
        return dict.fromkeys(KEYS) | facts
    return facts | {
        "leaf_switches": {
            switch.name: None if switch.nodes is None else len(set(switch.nodes))
            for switch in topology.switches
            if switch.nodes != ()
        },
        "roots": list(tree.roots),
        "levels": tree.levels,
        "nodes_on_two_leaves": list(topology.nodes_on_two_leaves),
        "undefined_child_switches": list(tree.undefined),
        "single_tree": len(tree.roots) == 1,
    }  # fmt: skip


def _switch(record: Record, warnings: list[str]) -> Switch:
    return Switch(
        record.name, record.line, record.topology,
        nodes=_names(record, "nodes", warnings),
        children=_names(record, "switches", warnings),
        level=_number(record, "level", warnings),
    )  # fmt: skip


def _block(record: Record, warnings: list[str]) -> Block:
    return Block(
        record.name, record.line, record.topology,
        nodes=_names(record, "nodes", warnings),
        index=_number(record, "blockindex", warnings),
        most_nodes=_number(record, "blocksize", warnings),
    )  # fmt: skip


def _names(record: Record, key: str, warnings: list[str]) -> tuple[str, ...] | None:
    """What a list of names means; None where it cannot be read, () where the record has none."""
    if key not in record.values:
        return ()
    value = record.values[key]
    try:
        names = expand_hostlist(value or "")
    except ToolkitError as error:
        warnings.append(f"line {record.line}: {record.name}: {error.message}")
        return None
    if not names or any(set(name) & set("=#()'\"") for name in names):
        warnings.append(f"line {record.line}: {record.name}: {key} cannot be read: {(value or '')[:60]!r}")
        return None
    if value and ("" in re.sub(r"\[[^\]]*\]", "x", value).split(",")):
        warnings.append(f"line {record.line}: {record.name}: {key} has an empty place: {value[-60:]!r}")
    return tuple(names)


def _number(record: Record, key: str, warnings: list[str]) -> int | None:
    value = record.values.get(key)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        warnings.append(f"line {record.line}: {record.name}: {key} is no number: {value[:60]!r}")
        return None
    return int(value)


def _line_of(warning: str) -> int:
    return int(warning.removeprefix("line ").partition(":")[0])
