"""Claim the switches above this node from the variables that Slurm sets in a job step."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.topology.claims import Answer
from toolkit.topology.readers.topology_address import parse_slurm_topology

__all__ = ["ask_slurm"]

ADDRESS_VARIABLE = "SLURM_TOPOLOGY_ADDR"
PATTERN_VARIABLE = "SLURM_TOPOLOGY_ADDR_PATTERN"


def ask_slurm(environ: Mapping[str, str]) -> Answer:
    """The switches in SLURM_TOPOLOGY_ADDR, as a claim."""
    answer = Answer(ADDRESS_VARIABLE, "direct", covers=(("switches",),))
    address, pattern = environ.get(ADDRESS_VARIABLE), environ.get(PATTERN_VARIABLE)
    if not address or not pattern:
        answer.miss(f"{ADDRESS_VARIABLE if not address else PATTERN_VARIABLE} is not set")
        return answer
    path, warnings = parse_slurm_topology(address, pattern)
    answer.say(path, "switches")
    if path is None:
        answer.miss(warnings[0])
    answer.warnings += [f"{ADDRESS_VARIABLE}: {warning}" for warning in warnings]
    return answer
