"""Read `scontrol show job`, `scontrol show node` and `scontrol show partition`: the facts that tools ask for."""

from __future__ import annotations

import re
from typing import Any

from toolkit.slurm.show_damage import Sort, made_of, noticed, of_job, of_node, of_partition
from toolkit.slurm.show_fields import Block, show_fields
from toolkit.slurm.states import STATES
from toolkit.slurm.table_damage import cut_end

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
# What scontrol prints of every job, node and partition, Slurm 17.11 to 24.11, the surest first; "|": one of them.
_ALWAYS_OF_JOB = ("JobState", "Partition", "TimeLimit", "NumNodes", "NumCPUs", "ExitCode", "JobName|Name", "UserId", "Priority",
                  "Restarts", "RunTime", "SubmitTime", "NodeList", "NumTasks", "CPUs/Task", "TRES|ReqTRES|AllocTRES")  # fmt: skip
_ALWAYS_OF_NODE = ("CPUTot", "RealMemory", "State", "CPUAlloc", "CoresPerSocket", "Sockets", "ThreadsPerCore", "Boards", "TmpDisk",
                   "Weight", "NodeAddr", "NodeHostName", "CPULoad", "AllocMem", "Owner", "MCS_label", "Gres", "ActiveFeatures|Features", "CfgTRES", "AllocTRES")  # fmt: skip
_ALWAYS_OF_PARTITION = (
    "Nodes",
    "State",
    "TotalCPUs",
    "TotalNodes",
    "Default",
    "MaxTime",
    "MinNodes",
    "AllowGroups",
    "AllocNodes",
)
# scontrol(1) and slurm_node_state_string_complete(), Slurm 17.11 to 24.11: a node's base state, and flags behind "+".
_NODE_STATES = frozenset(
    """ALLOCATED BLOCKED CLOUD COMPLETING DOWN DRAIN DRAINED DRAINING DYNAMIC_FUTURE DYNAMIC_NORM ERROR EXTERNAL FAIL FAILING
    FUTURE IDLE INVAL INVALID_REG MAINTENANCE MAINT MIXED NO_RESPOND NOT_RESPONDING PERFCTRS PLANNED POWER POWERED_DOWN
    POWERING_DOWN POWERING_UP POWER_DOWN POWER_DRAIN POWER_UP REBOOT REBOOT_CANCEL REBOOT_ISSUED REBOOT_REQUESTED RESERVED
    RES RESUME UNDRAIN UNKNOWN""".split()  # noqa: SIM905
)
_PARTITION_STATES = frozenset({"UP", "DOWN", "DRAIN", "INACTIVE"})
_JOBS = Sort("JobId", _ALWAYS_OF_JOB, {"ReqTRES": ("AllocTRES",), "ArrayJobId": ("ArrayTaskId",), "ArrayTaskId": ("ArrayJobId",)},
             ("JobState", STATES), of_job)  # fmt: skip
_NODES = Sort("NodeName", _ALWAYS_OF_NODE, {"Arch": ("OS",), "Version": ("OS",)}, ("State", _NODE_STATES), of_node)
_PARTITIONS = Sort("PartitionName", _ALWAYS_OF_PARTITION, {}, ("State", _PARTITION_STATES), of_partition)
_OLD_NAMES = {"JobName": ("JobName", "Name"), "Features": ("ActiveFeatures", "Features")}
_WHO_AND_WHEN = re.compile(r"\s*\[[^\[\]]*@[^\[\]]*\]\s*$")

Facts = tuple[dict[str, Any], tuple[str, ...]]


def parse_show_job(text: str) -> Facts:
    """The facts of `scontrol show job`, also with -d and -o: (values of `JOB_KEYS`, warnings).

    Raises:
        CheckFailedError: no job is printed.
    """
    blocks, warnings = _read(text, _JOBS)
    return {"job_count": len(blocks), "jobs": [_chosen(block, _JOB) for block in blocks]}, warnings


def parse_show_node(text: str) -> Facts:
    """The facts of `scontrol show node`, also with -o: (values of `NODE_KEYS`, warnings).

    Raises:
        CheckFailedError: no node is printed.
    """
    blocks, warnings = _read(text, _NODES)
    nodes = [_chosen(block, _NODE) for block in blocks]
    for node in nodes:
        node["Reason"] = None if node["Reason"] is None else _WHO_AND_WHEN.sub("", node["Reason"])
    return {"node_count": len(nodes), "nodes": nodes}, warnings


def parse_show_partition(text: str) -> Facts:
    """The facts of `scontrol show partition`, also with -o: (values of `PARTITION_KEYS`, warnings).

    Raises:
        CheckFailedError: no partition is printed.
    """
    blocks, warnings = _read(text, _PARTITIONS)
    return {"partitions": [_chosen(block, _PARTITION) for block in blocks]}, warnings


def _read(text: str, sort: Sort) -> tuple[list[Block], tuple[str, ...]]:
    """The records, without the values that are damaged, and all warnings in the order of their lines.

    A state at the end of a text is lost where it is cut.
    """
    blocks, warnings = show_fields(text, sort.first)
    warnings += noticed(blocks, sort)
    key, known = sort.state
    value = blocks[-1].get(key)
    if value is not None and text.rstrip(" ").endswith(f"{key}={value}") and not made_of(value, known):
        del blocks[-1].values[key]
    ordered = sorted(warnings, key=lambda warning: int(warning.removeprefix("line ").partition(":")[0]))
    return blocks, (*ordered, *cut_end(text))


def _chosen(block: Block, keys: list[str]) -> dict[str, str | None]:
    return {key: block.get(*_OLD_NAMES.get(key, (key,))) for key in keys}
