"""Read `squeue`: the jobs of a queue, in the words that were printed."""

from __future__ import annotations

import re
from typing import Any

from toolkit.slurm.tables import COUNT, ONE_WORD, Row, Table, read_table

KEYS = {
    "rows": "how many jobs are printed; an array that waits is one row",
    "jobs": "each of them, null where no header tells the columns: jobid, partition, name, user, st, time, nodes, "
    "nodelist_reason, as printed, null for a column that was not printed",
}
# Our key: squeue's column names, the first that was printed counts.
_COLUMNS = {
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
_FORMS = {"PARTITION": ONE_WORD, "USER": ONE_WORD, "ST": _STATE, "STATE": _STATE, "TIME": ONE_WORD, "NODES": COUNT}
_KNOWN = frozenset(name for names in _COLUMNS.values() for name in names) | {"NODELIST", "REASON", "ACCOUNT", "QOS"}
_JOB_ID = re.compile(r"[0-9]+(_([0-9]+|\[.*|\*))?(\+[0-9]+)?(\.\S+)?")


def parse_squeue(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of squeue: (values of `KEYS`, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of squeue.
    """
    table = read_table(text, _KNOWN, "squeue", key=_JOB_ID)
    warnings = list(table.warnings)
    if table.columns is None:
        return {"rows": len(table.rows), "jobs": None}, tuple(warnings)
    jobs = [_job(table, row, warnings) for row in table.rows]
    return {"rows": len(jobs), "jobs": jobs}, tuple(warnings)


def _job(table: Table, row: Row, warnings: list[str]) -> dict[str, str | None]:
    job_id = table.cell(row, *_COLUMNS["jobid"])
    if job_id is not None and not _JOB_ID.fullmatch(job_id):
        warnings.append(f"line {row.line}: {job_id[:60]!r} is no job id; nothing is read from it")
        row = Row(row.line, None)
    elif table.has_slipped(row, _FORMS):
        warnings.append(f"line {row.line}: its columns cannot be told apart; nothing is read from it")
        row = Row(row.line, None)
    job = {key: table.cell(row, *names) for key, names in _COLUMNS.items()}
    if job["nodelist_reason"] is None:
        nodes, reason = table.cell(row, "NODELIST"), table.cell(row, "REASON")
        # As squeue's own column of both: the nodes, and while there are none the reason.
        job["nodelist_reason"] = nodes or (f"({reason})" if reason else nodes)
    return job
