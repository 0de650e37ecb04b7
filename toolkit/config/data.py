"""The table [data]: what the job reads."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from toolkit.config.table import Table, key, refuse_value

MOST_WORKERS = 256


class DataTable(Table):
    """Paths are relative to the job file."""

    paths: list[str] = key(
        None,
        "Files or globs; empty takes the job's own default.",
        form='a list of paths or globs such as ["corpus/*.txt"]',
        default_factory=list,
    )
    workers: Literal["auto"] | int = key(
        "auto",
        "Processes of each rank that read batches ahead; 0 reads in the rank itself. `auto` reads some batches with 0, 1, 2 "
        "and 4 of them, for two seconds in all, and keeps the fastest.",
        form='"auto" or a whole number, at least 0',
    )
    prefetch: int = key(2, "Batches that each worker is ahead.", ge=1, le=1024)
    broken: Literal["fail", "skip"] = key(
        "fail",
        "What a record that cannot be read leads to: the end of the attempt, or the next good record in its place.",
    )
    broken_limit: float = key(
        0.01, "With `broken` skip: largest share of the samples that a rank has read that may be replaced.", ge=0, le=1
    )
    index_folder: str = key(
        "",
        "Folder for the indexes of JSON-lines files; empty keeps each beside its file, or in the user's cache folder.",
    )

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, workers: int | str) -> int | str:
        if isinstance(workers, int) and not 0 <= workers <= MOST_WORKERS:
            raise refuse_value((), f"{workers} is no number of workers", f'write "auto" or 0 to {MOST_WORKERS}')
        return workers
