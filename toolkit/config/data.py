"""The table [data]: what the job reads."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from toolkit.config.table import Table, key

MOST_WORKERS = 256


def matches(pattern: str, folder: Path) -> Iterator[str]:
    """What one of `data.paths` names; relative patterns and names start at `folder`, and `**` goes through folders."""
    return glob.iglob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207  Path.glob refuses absolute patterns


class DataTable(Table):
    """Paths are relative to the job file."""

    paths: list[str] = key(
        None,
        "Files or globs; empty takes the job's own default. Each must match something where the job is submitted, unless that "
        "waits for another (`-d`), or has the path in a container or on the node itself.",
        form='a list of paths or globs such as ["corpus/*.txt"]',
        default_factory=list,
    )
    workers: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_WORKERS)] = key(
        "auto",
        "Processes of each rank that read batches ahead; 0 reads in the rank itself. `auto` reads some batches with 0, 1, 2 "
        "and 4 of them, for two seconds in all, and keeps the fastest.",
        form=f'"auto" or a whole number, at least 0, at most {MOST_WORKERS}',
    )
    prefetch: int = key(2, "Batches that each worker is ahead.", ge=1, le=1024)
    broken: Literal["fail", "skip"] = key(
        "fail",
        "What a record that cannot be read leads to: the end of the attempt, or the next good record in its place.",
    )
    broken_limit: float = key(
        0.01,
        "With `broken` skip: largest share of the samples that all ranks have read that may be replaced.",
        ge=0,
        le=1,
    )
    index_folder: str = key(
        "",
        "Folder for the indexes of JSON-lines files; empty keeps each beside its file, or in the user's cache folder.",
    )
