"""Read where Slurm places a node in the switch tree (or block) from the two variables of a job step.

`SLURM_TOPOLOGY_ADDR=core.leaf2.node7` is read with `SLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node`; both are
described in srun(1). A level that has several switches keeps its text ("s[1-2]") as Slurm wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SwitchPath:
    """The switches (or blocks) above a node, from the root down; empty on a cluster without a topology."""

    levels: tuple[str, ...]
    kinds: tuple[str, ...]
    node: str

    @property
    def leaf(self) -> str | None:
        """The switch or block next to the node, None when Slurm knows of none."""
        return self.levels[-1] if self.levels else None


def parse_slurm_topology(address: str, pattern: str) -> tuple[SwitchPath | None, tuple[str, ...]]:
    """Read address and pattern: (path, warnings). The path is None when the two do not fit each other."""
    names, kinds = address.strip().split("."), pattern.strip().split(".")
    if len(names) != len(kinds):
        # A dot in a name makes every level ambiguous, so nothing is taken from it.
        return None, (f"address {address!r} has {len(names)} parts, pattern {pattern!r} has {len(kinds)}",)
    if kinds[-1] != "node" or "" in names or "" in kinds:
        return None, (f"address {address!r} with pattern {pattern!r} does not end in a named node",)
    return SwitchPath(levels=tuple(names[:-1]), kinds=tuple(kinds[:-1]), node=names[-1]), ()
