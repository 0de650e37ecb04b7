"""Read `sacct`: the shape of its table. Records that a line end in a field breaks are put together again."""

from __future__ import annotations

from typing import Any

from toolkit.slurm.tables import read_table

KEYS = {
    "physical_lines": "how many lines are printed, with the header",
    "columns": "how many columns the header names, null without a header",
    "first_columns": "the first six of them, null without a header",
    "rows_with_other_field_count": "lines, counted from 0 at the header, that have not the header's number of fields: "
    "they are cut, or a field of theirs holds a line end",
}
_KNOWN = frozenset(
    """Account AllocCPUS AllocNodes AllocTRES Cluster Comment CPUTime CPUTimeRAW Elapsed ElapsedRaw Eligible End ExitCode
    JobID JobIDRaw JobName NCPUS NNodes NodeList NTasks Partition QOS Start State Submit Timelimit User""".split()  # noqa: SIM905
)


def parse_sacct(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of sacct: (values of `KEYS`, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of sacct.
    """
    table = read_table(text, _KNOWN, "sacct", unique={"JOBID", "JOBIDRAW"}, several_lines=True)
    columns = table.columns
    return {
        "physical_lines": table.lines,
        "columns": None if columns is None else len(columns),
        "first_columns": None if columns is None else list(columns[:6]),
        "rows_with_other_field_count": list(table.uneven),
    }, table.warnings
