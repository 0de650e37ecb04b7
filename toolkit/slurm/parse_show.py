"""Read `scontrol show job`, `scontrol show node` and `scontrol show partition`: the facts that tools ask for."""

from __future__ import annotations

import re
from typing import Any

from toolkit.slurm.show_fields import Block, show_fields

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
_OLD_NAMES = {"JobName": ("JobName", "Name"), "Features": ("ActiveFeatures", "Features")}
_WHO_AND_WHEN = re.compile(r"\s*\[[^\[\]]*@[^\[\]]*\]\s*$")

Facts = tuple[dict[str, Any], tuple[str, ...]]


def parse_show_job(text: str) -> Facts:
    """The facts of `scontrol show job`, also with -d and -o: (values of `JOB_KEYS`, warnings).

    Raises:
        CheckFailedError: no job is printed.
    """
    blocks, warnings = show_fields(text, "JobId")
    return {"job_count": len(blocks), "jobs": [_chosen(block, _JOB) for block in blocks]}, warnings


def parse_show_node(text: str) -> Facts:
    """The facts of `scontrol show node`, also with -o: (values of `NODE_KEYS`, warnings).

    Raises:
        CheckFailedError: no node is printed.
    """
    blocks, warnings = show_fields(text, "NodeName")
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
    return {"partitions": [_chosen(block, _PARTITION) for block in blocks]}, warnings


def _chosen(block: Block, keys: list[str]) -> dict[str, str | None]:
    return {key: block.get(*_OLD_NAMES.get(key, (key,))) for key in keys}
