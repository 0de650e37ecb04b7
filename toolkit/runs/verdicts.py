"""Read the verdicts on a run, which its supervisor writes while the run is active."""

from toolkit.errors import ToolkitError
from toolkit.metrics.verdicts import Verdict, open_verdicts, read_verdicts
from toolkit.rundir.layout import RunDirectory

__all__ = ["all_verdicts", "raised_verdicts"]


def all_verdicts(run: RunDirectory) -> list[Verdict]:
    """Return all changes of verdicts, oldest first; [] if there were none. ToolkitError if the file is damaged."""
    try:
        return read_verdicts(run.metrics / "verdicts.jsonl")
    except FileNotFoundError:
        return []


def raised_verdicts(run: RunDirectory) -> list[Verdict]:
    """Return the raised verdicts of the last attempt, the most severe first; [] if the file is damaged.

    `toolkit verdict` names the damaged line; it must not hide the state of a run.
    """
    last = run.last_attempt()
    try:
        return open_verdicts(all_verdicts(run), last.number) if last is not None else []
    except (ToolkitError, OSError):
        return []
