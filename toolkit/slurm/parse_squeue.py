"""Read `squeue`: the jobs of a queue, in the words that were printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolkit.slurm.table_damage import other_count
from toolkit.slurm.tables import COUNT, ONE_WORD, Row, Table, chosen, read_table

KEYS = {
    "rows": "how many jobs are printed; an array that waits is one row",
    "jobs": "each of them, null where no header tells the columns: jobid, partition, name, user, st, time, nodes, "
    "nodelist_reason, as printed, null for a column that was not printed",
}
# Our key: squeue's column names, the first that was printed counts.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "jobid": ("JOBID", "JOBARRAYID"),
    "partition": ("PARTITION",),
    "name": ("NAME",),
    "user": ("USER",),
    "st": ("ST", "STATE"),
    "time": ("TIME",),
    "nodes": ("NODES",),
    "nodelist_reason": ("NODELIST(REASON)",),
}
_STATE = re.compile(r"[A-Z_]+")
_TIME = re.compile(r"[0-9][0-9:-]*|INVALID|UNLIMITED|N/A|NOT_SET", re.IGNORECASE)
_NODES_OR_REASON = re.compile(r"\(.*\)|[^\s(]\S*")
_LAST_AND_CUT = re.compile(_NODES_OR_REASON.pattern + r"|\([^)]*")  # `%.20R`
_FORMS = {
    "PARTITION": ONE_WORD, "USER": ONE_WORD, "ST": _STATE, "STATE": _STATE, "TIME": _TIME, "NODES": COUNT,
    "NODELIST(REASON)": _NODES_OR_REASON, "NODELIST": ONE_WORD,
}  # fmt: skip
_APART: dict[str, tuple[str, ...]] = {"nodes_alone": ("NODELIST",), "reason_alone": ("REASON",)}
_KNOWN = frozenset(name for names in _COLUMNS.values() for name in names) | {"NODELIST", "REASON", "ACCOUNT", "QOS"}
_LOSES_NODES = frozenset({"CG", "COMPLETING"})  # the list has those that are not free yet
_JOB_ID = re.compile(r"[0-9]+(_([0-9]+|\[.*|\*))?(\+[0-9]+)?(\.\S+)?")


def parse_squeue(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of squeue: (values of `KEYS`, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of squeue.
    """
    table = read_table(text, _KNOWN, "squeue", unique={"JOBID", "JOBARRAYID"}, key=_JOB_ID)
    warnings = list(table.warnings)
    if table.columns is None:
        return {"rows": len(table.rows), "jobs": None}, tuple(warnings)
    forms = _FORMS | ({"NODELIST(REASON)": _LAST_AND_CUT} if table.columns[-1] == "NODELIST(REASON)" else {})
    jobs = [_job(table, row, forms, warnings) for row in table.rows]
    return {"rows": len(jobs), "jobs": jobs}, tuple(warnings)


def _job(table: Table, row: Row, forms: Mapping[str, re.Pattern[str]], warnings: list[str]) -> dict[str, str | None]:
    job_id = table.cell(row, *_COLUMNS["jobid"])
    if job_id is not None and not _JOB_ID.fullmatch(job_id):
        warnings.append(f"line {row.line}: {job_id[:60]!r} is no job id; nothing is read from it")
        row = Row(row.line, None)
    job = chosen(table, row, _COLUMNS | _APART, forms, warnings)
    nodes, reason = job.pop("nodes_alone"), job.pop("reason_alone")
    if job["nodelist_reason"] is None:
        # As squeue's own column of both: the nodes, and while there are none the reason. A job that runs has no reason.
        waits_for = f"({reason})" if reason and (reason != "None" or nodes is not None) else nodes
        job["nodelist_reason"] = nodes or waits_for
    if job["st"] not in _LOSES_NODES:
        warnings += other_count(row.line, job["nodes"], job["nodelist_reason"])
    return job
