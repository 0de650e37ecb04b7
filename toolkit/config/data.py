"""The table [data]: what the job reads."""

from __future__ import annotations

from toolkit.config.table import Table, key


class DataTable(Table):
    """Paths are relative to the job file."""

    paths: list[str] = key(
        None,
        "Files or globs; empty takes the job's own default.",
        form='a list of paths or globs such as ["corpus/*.txt"]',
        default_factory=list,
    )
