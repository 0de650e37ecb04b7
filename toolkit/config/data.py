"""The table [data]: the input of the job."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from toolkit.config.table import Table, key

__all__ = ["matches"]

MOST_WORKERS = 256


def matches(pattern: str, folder: Path) -> Iterator[str]:
    """The files that one entry of `data.paths` names; relative entries start at `folder`, and `**` matches all subfolders."""
    return glob.iglob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207  Path.glob refuses absolute patterns


class DataTable(Table):
    """Paths are relative to the job file."""

    paths: list[str] = key(
        None,
        "Files or globs; empty uses the job's own default. Each must match a file at submission, unless the job waits for "
        "another one (`-d`), or the path is in a container or on the node itself.",
        form='a list of paths or globs such as ["corpus/*.txt"]',
        default_factory=list,
    )
    workers: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_WORKERS)] = key(
        "auto",
        "Processes of each rank that read batches ahead; 0 reads in the rank itself. `auto` tries 0, 1, 2 and 4 of them for "
        "two seconds in total, and keeps the fastest.",
        form=f'"auto" or a whole number, at least 0, at most {MOST_WORKERS}',
    )
    prefetch: int = key(2, "Batches that each worker reads ahead.", ge=1, le=1024)
    broken: Literal["fail", "skip"] = key(
        "fail", "What happens at an unreadable record: the attempt ends, or the next readable record replaces it."
    )
    broken_limit: float = key(
        0.01, "With `broken` skip: largest share of all ranks' samples that may be replaced.", ge=0, le=1
    )
    index_folder: str = key(
        "",
        "Folder for the indexes of JSON-lines files; empty keeps each next to its file, or in the user's cache folder.",
    )
