"""Read the position of a node in the switch tree (or block) from two variables of a Slurm job step.

Example: `SLURM_TOPOLOGY_ADDR=core.leaf2.node7` with `SLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node`; srun(1) describes
both. A level with several switches is kept as Slurm writes it ("s[1-2]").
"""

import re
from dataclasses import dataclass
from typing import Any

from toolkit.topology.readers.lines import first_damaged, lines_of, refusal

KEYS = {
    "node": "name of the node; null if address and pattern do not match",
    "levels": "switches or blocks above the node, from the root down; null if address and pattern do not match",
    "kinds": "type of each level, such as switch or block; null if address and pattern do not match",
    "leaf": "the switch or block next to the node; null if Slurm reports none",
}
_VARIABLE = re.compile(r"(?:export |declare -x )?(SLURM_TOPOLOGY_ADDR(?:_PATTERN)?)=(.*)$")
_ADDRESS, _PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
KINDS_OF_LEVELS = frozenset({"switch", "block", "node"})


@dataclass(frozen=True)
class SwitchPath:
    """The switches (or blocks) above a node, from the root down; empty on a cluster without a topology."""

    levels: tuple[str, ...]
    kinds: tuple[str, ...]
    node: str

    @property
    def leaf(self) -> str | None:
        """The switch or block next to the node; None if Slurm reports none."""
        return self.levels[-1] if self.levels else None


def parse_slurm_topology(address: str, pattern: str) -> tuple[SwitchPath | None, tuple[str, ...]]:
    """Return (path, warnings) for an address and its pattern; the path is None if the two do not match."""
    names, kinds = address.strip().split("."), pattern.strip().split(".")
    if len(names) != len(kinds):
        # If a name contains a dot, the address cannot be split into levels.
        return None, (f"address {address!r} has {len(names)} parts, pattern {pattern!r} has {len(kinds)}",)
    if kinds[-1] != "node" or "" in names or "" in kinds:
        return None, (f"expected an address that ends with a node name, got {address!r} with pattern {pattern!r}",)
    return SwitchPath(levels=tuple(names[:-1]), kinds=tuple(kinds[:-1]), node=names[-1]), ()


def parse_topology_address(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (values of `KEYS`, warnings) for the output of `env | grep SLURM_TOPOLOGY`.

    Raises:
        CheckFailedError: `text` contains neither variable.
    """
    lines, cut = lines_of(text)
    warnings: list[str] = []
    values: dict[str, tuple[int, str]] = {}
    contested = False
    for number, line in lines:
        match = _VARIABLE.match(line.strip())
        if match is None:
            if "TOPOLOGY" in line:
                warnings.append(f"line {number}: expected a SLURM_TOPOLOGY_ADDR variable, got {line.strip()[:60]!r}")
            continue
        value = match[2].strip().strip("\"'")
        if match[1] in values:
            warnings.append(f"line {number}: {match[1]} is also on line {values[match[1]][0]}")
            contested |= values[match[1]][1] != value
        values.setdefault(match[1], (number, value))
    if not values:
        raise refusal("env | grep SLURM_TOPOLOGY", [line for line in lines if line.text.strip()])
    path = None if contested else _path(values, warnings)
    facts = dict.fromkeys(KEYS) if path is None else {
        "node": path.node, "levels": list(path.levels), "kinds": list(path.kinds), "leaf": path.leaf
    }  # fmt: skip
    return facts, first_damaged([*warnings, *cut])


def _path(values: dict[str, tuple[int, str]], warnings: list[str]) -> SwitchPath | None:
    for missing in {_ADDRESS, _PATTERN} - values.keys():
        ((number, _),) = values.values()
        warnings.append(f"line {number}: {missing} not found, which is needed as well")
        return None
    (number, address), (place, pattern) = values[_ADDRESS], values[_PATTERN]
    strange = [kind for kind in pattern.split(".") if kind not in KINDS_OF_LEVELS]
    if strange:
        warnings.append(f"line {place}: expected switch, block or node as a level, got {strange[0][:60]!r}")
        return None
    if re.search(r"[\s=\ufffd]", address) or address.count("[") != address.count("]"):
        warnings.append(f"line {number}: expected an address, got {address[:60]!r}")
        return None
    path, problems = parse_slurm_topology(address, pattern)
    warnings += [f"line {number}: {problem}" for problem in problems]
    return path
