"""Read `scontrol show job`, `scontrol show node` and `scontrol show partition`: the facts that tools ask for."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from toolkit.slurm.show_fields import Block, show_fields
from toolkit.slurm.states import STATES

_JOB = """JobId ArrayJobId ArrayTaskId JobName JobState Partition NodeList NumNodes NumCPUs TRES AllocTRES RunTime TimeLimit
    Restarts ExitCode""".split()  # noqa: SIM905
_NODE = """NodeName CPUTot CPUAlloc CoresPerSocket Sockets ThreadsPerCore RealMemory State Gres Partitions Version
    ActiveFeatures CfgTRES AllocTRES Reason OS""".split()  # noqa: SIM905
_PARTITION = "PartitionName Default Nodes TotalNodes TotalCPUs MaxTime State".split()  # noqa: SIM905
_PRINTED = ", as printed, null for what was not printed"
JOB_KEYS = {
    "job_count": "how many jobs are printed; one that is printed twice counts twice",
    "jobs": f"each of them: {', '.join(_JOB)}{_PRINTED}",
}
NODE_KEYS = {
    "node_count": "how many nodes are printed",
    "nodes": f"each of them: {', '.join(_NODE)}{_PRINTED}; Reason without who set it and when",
}
PARTITION_KEYS = {"partitions": f"each of them: {', '.join(_PARTITION)}{_PRINTED}"}
# What scontrol prints of every job, node and partition, whatever its version; of the last one it is missing where the
# text ends early.
_ALWAYS_OF_JOB = ("JobState", "Partition", "TimeLimit", "NumNodes", "NumCPUs", "ExitCode")
_ALWAYS_OF_NODE = ("CPUTot", "RealMemory", "State")
_ALWAYS_OF_PARTITION = ("Nodes", "State", "TotalCPUs", "TotalNodes")
# scontrol(1) and slurm_node_state_string_complete(), Slurm 17.11 to 24.11: a node's base state, and flags behind "+".
_NODE_STATES = frozenset(
    """ALLOCATED BLOCKED CLOUD COMPLETING DOWN DRAIN DRAINED DRAINING DYNAMIC_FUTURE DYNAMIC_NORM ERROR EXTERNAL FAIL FAILING
    FUTURE IDLE INVAL INVALID_REG MAINTENANCE MAINT MIXED NO_RESPOND NOT_RESPONDING PERFCTRS PLANNED POWER POWERED_DOWN
    POWERING_DOWN POWERING_UP POWER_DOWN POWER_DRAIN POWER_UP REBOOT REBOOT_CANCEL REBOOT_ISSUED REBOOT_REQUESTED RESERVED
    RES RESUME UNDRAIN UNKNOWN""".split()  # noqa: SIM905
)
_PARTITION_STATES = frozenset({"UP", "DOWN", "DRAIN", "INACTIVE"})
_OLD_NAMES = {"JobName": ("JobName", "Name"), "Features": ("ActiveFeatures", "Features")}
_WHO_AND_WHEN = re.compile(r"\s*\[[^\[\]]*@[^\[\]]*\]\s*$")

Facts = tuple[dict[str, Any], tuple[str, ...]]


def parse_show_job(text: str) -> Facts:
    """The facts of `scontrol show job`, also with -d and -o: (values of `JOB_KEYS`, warnings).

    Raises:
        CheckFailedError: no job is printed.
    """
    blocks, warnings = show_fields(text, "JobId")
    warnings += _at_the_end(text, blocks, ("JobState", STATES), _ALWAYS_OF_JOB)
    return {"job_count": len(blocks), "jobs": [_chosen(block, _JOB) for block in blocks]}, warnings


def parse_show_node(text: str) -> Facts:
    """The facts of `scontrol show node`, also with -o: (values of `NODE_KEYS`, warnings).

    Raises:
        CheckFailedError: no node is printed.
    """
    blocks, warnings = show_fields(text, "NodeName")
    warnings += _at_the_end(text, blocks, ("State", _NODE_STATES), _ALWAYS_OF_NODE)
    nodes = [_chosen(block, _NODE) for block in blocks]
    for node in nodes:
        node["Reason"] = None if node["Reason"] is None else _WHO_AND_WHEN.sub("", node["Reason"])
    return {"node_count": len(nodes), "nodes": nodes}, warnings


def parse_show_partition(text: str) -> Facts:
    """The facts of `scontrol show partition`, also with -o: (values of `PARTITION_KEYS`, warnings).

    Raises:
        CheckFailedError: no partition is printed.
    """
    blocks, warnings = show_fields(text, "PartitionName")
    warnings += _at_the_end(text, blocks, ("State", _PARTITION_STATES), _ALWAYS_OF_PARTITION)
    return {"partitions": [_chosen(block, _PARTITION) for block in blocks]}, warnings


def _at_the_end(
    text: str, blocks: Sequence[Block], state: tuple[str, Collection[str]], always: Sequence[str]
) -> tuple[str, ...]:
    """Warnings where the text ends in the middle of its last record, which loses a state that is cut.

    `state` is the key of the record's state and the words that it is made of; `always` are keys that no record lacks,
    unless all records of this text do, as behind a grep.
    """
    *others, last = blocks
    key, known = state
    value = last.get(key)
    warnings = []
    if value is not None and text.rstrip(" ").endswith(f"{key}={value}") and not _made_of(value, known):
        del last.values[key]
        warnings.append(f"line {text.count(chr(10)) + 1}: {key}={value[:60]} is cut, or no state of Slurm's")
    printed = [name for name in always if not others or any(name in block.values for block in others)]
    missing = [name for name in printed if name not in last.values and name not in last.contested]
    if missing:
        warnings.append(f"line {last.line}: the record ends early, without {', '.join(missing)}")
    return tuple(warnings)


def _made_of(value: str, known: Collection[str]) -> bool:
    return all(word.rstrip("*~#!%$@^-") in known for word in re.split(r"[+,]", value))


def _chosen(block: Block, keys: list[str]) -> dict[str, str | None]:
    return {key: block.get(*_OLD_NAMES.get(key, (key,))) for key in keys}
