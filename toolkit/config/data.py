"""The table [data]: the input data of the job."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from toolkit.config.table import Table, key

__all__ = ["matches"]

MOST_WORKERS = 256


def matches(pattern: str, folder: Path) -> Iterator[str]:
    """Return the files that one entry of `data.paths` matches, relative to `folder`; `**` matches all subfolders."""
    return glob.iglob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207  Path.glob refuses absolute patterns


class DataTable(Table):
    """Paths are relative to the job file."""

    paths: list[str] = key(
        None,
        "Input files or globs; empty uses the default of the job script. Each must match a file at submission, unless the job "
        "waits for another job (`-d`), or the path is inside a container or on a node-local disk.",
        form='a list of paths or globs such as ["corpus/*.txt"]',
        default_factory=list,
    )
    workers: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_WORKERS)] = key(
        "auto",
        "Number of data loader processes per rank; 0 reads in the rank itself. `auto` tries 0, 1, 2 and 4 for two seconds in "
        "total and uses the fastest.",
        form=f'"auto" or a whole number, at least 0, at most {MOST_WORKERS}',
    )
    prefetch: int = key(2, "Number of batches that each worker prefetches.", ge=1, le=1024)
    broken: Literal["fail", "skip"] = key(
        "fail",
        "What to do about an unreadable record: `fail` ends the attempt with an error, `skip` uses the next readable record.",
    )
    broken_limit: float = key(
        0.01, 'With `broken = "skip"`: maximum fraction of samples that may be replaced, over all ranks.', ge=0, le=1
    )
    index_folder: str = key(
        "",
        "Folder for the index files of JSON Lines input; empty stores each next to its input file, or in the user's cache folder.",
    )
