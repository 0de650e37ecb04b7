"""Record the parents of a run, which --after names, and make the Slurm dependency on them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.find import newest_record
from toolkit.rundir.layout import RunDirectory
from toolkit.slurm.sbatch_options import last_value_of

__all__ = ["KINDS", "Parent", "dependency_options", "record_of"]

KINDS = {"ok": "afterok", "any": "afterany"}  # sbatch's dependency types


@dataclass(frozen=True)
class Parent:
    """A run or task that another one follows. `kind` is "ok" if it must succeed, "any" if any outcome is enough;
    `job_id` is the job that Slurm waits for, "" if the parent has ended.
    """

    run_id: str
    kind: str
    job_id: str
    path: str

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(Path(self.path))


def dependency_options(after: Sequence[Parent], given: Sequence[str] = ()) -> list[str]:
    """Return the sbatch options for these parents, merged with a dependency in `given`; [] without parents.

    If a parent can no longer end as required, Slurm cancels the run instead of letting it wait forever.

    Raises:
        ToolkitError: the given dependency cannot be merged with ours.
    """
    open_ones = [parent for parent in after if parent.job_id]
    if not open_ones:
        return []
    own = last_value_of(given, "dependency", "d")
    if "?" in own:
        raise ToolkitError(
            f"--after requires all of its runs, but {own} is satisfied by any of its jobs", where=f"--dependency={own}",
            fix="omit --after, or join the dependencies with commas",
        )  # fmt: skip
    ours = ",".join(f"{KINDS[parent.kind]}:{parent.job_id}" for parent in open_ones)
    return [f"--dependency={own},{ours}" if own else f"--dependency={ours}", "--kill-on-invalid-dep=yes"]


def record_of(after: Sequence[Parent]) -> dict[str, Any]:
    """Return the parents' entry for `record.json` and `resumed-SSS.json`; empty without parents."""
    return {"after": [asdict(parent) for parent in after]} if after else {}


def parents_of(run: RunDirectory) -> list[Parent]:
    """Return the parents of a run's newest start."""
    return parents_in(newest_record(run))


def parents_in(path: Path) -> list[Parent]:
    """Return the parents in `record.json` or `resumed-SSS.json`.

    Raises:
        ToolkitError: the file is damaged.
    """
    record: Mapping[str, Any] = read_json_or_none(path) or {}
    try:
        return [
            Parent(**{name: str(one[name]) for name in ("run_id", "kind", "job_id", "path")})
            for one in record.get("after", [])
        ]
    except (KeyError, TypeError) as error:
        raise ToolkitError(
            "the record is damaged: its list of parents is incomplete", where=f"{path}:after",
            fix="restore the file or start a new run",
        ) from error  # fmt: skip
