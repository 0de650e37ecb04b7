"""Read `sinfo`: partitions and the states of their nodes, in the words that were printed."""

from __future__ import annotations

import re
from typing import Any

from toolkit.slurm.table_damage import other_count
from toolkit.slurm.tables import COUNT, ONE_WORD, chosen, read_table

KEYS = {
    "rows": "how many lines are printed; a node stands in one for each of its partitions",
    "table": "each of them, null where no header tells the columns: partition, avail, timelimit, nodes, state, "
    "nodelist, as printed, null for a column that was not printed; nodes of `sinfo -s` is the total",
}
_COLUMNS: dict[str, tuple[str, ...]] = {
    "partition": ("PARTITION", "PARTITIONNAME"),
    "avail": ("AVAIL",),
    "timelimit": ("TIMELIMIT",),
    "nodes": ("NODES",),
    "state": ("STATE",),
    "nodelist": ("NODELIST", "HOSTNAMES"),
}
_AVAIL = re.compile(r"up|down|drain|inact(ive)?|n/a", re.IGNORECASE)
_LIMIT = re.compile(r"[0-9][0-9:-]*|infinite|unlimited|partition|none|n/a|invalid", re.IGNORECASE)
_STATE = re.compile(r"[A-Za-z_/+]+[*~#!%$@^+-]*")
_FORMS = {"PARTITION": ONE_WORD, "AVAIL": _AVAIL, "TIMELIMIT": _LIMIT, "NODES": COUNT, "STATE": _STATE,
          "NODELIST": ONE_WORD, "HOSTNAMES": ONE_WORD}  # fmt: skip
_SUM: dict[str, tuple[str, ...]] = {"sum": ("NODES(A/I/O/T)",)}
_KNOWN = frozenset(name for names in _COLUMNS.values() for name in names) | {"NODES(A/I/O/T)", "CPUS(A/I/O/T)"}
_COUNTS = re.compile(r"[0-9.KMG]+/[0-9.KMG]+/[0-9.KMG]+/([0-9.KMG]+)")


def parse_sinfo(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of an output of sinfo: (values of `KEYS`, warnings that name the damaged lines).

    Raises:
        CheckFailedError: it is no output of sinfo.
    """
    table = read_table(text, _KNOWN, "sinfo", unique={"PARTITION", "PARTITIONNAME"})
    if table.columns is None:
        return {"rows": len(table.rows), "table": None}, table.warnings
    warnings = list(table.warnings)
    entries = [chosen(table, row, _COLUMNS | _SUM, _FORMS, warnings) for row in table.rows]
    for row, entry in zip(table.rows, entries, strict=True):
        warnings += other_count(row.line, entry["nodes"], entry["nodelist"])
        counts = _COUNTS.fullmatch(entry.pop("sum") or "")
        if entry["nodes"] is None and counts:
            entry["nodes"] = counts[1]
    return {"rows": len(entries), "table": entries}, tuple(warnings)
