"""Read the verdicts on a run, which its supervisor writes while the run is active."""

from toolkit.errors import ToolkitError
from toolkit.metrics.verdicts import Severity, Verdict, line_of_verdict, open_verdicts, read_verdicts
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState

__all__ = ["all_verdicts", "are_past", "raised_verdicts", "verdict_lines"]


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


def verdict_lines(run: RunDirectory, state: RunState) -> list[str]:
    """Return a line for each raised verdict of a run in this state, only for the critical ones if it completed."""
    found = [
        one for one in raised_verdicts(run) if state is not RunState.COMPLETED or one.severity is Severity.CRITICAL
    ]
    is_past = are_past(run, state)
    return [line_of_verdict(one, is_past=is_past) for one in found]


def are_past(run: RunDirectory, state: RunState) -> bool:
    """Return whether the last attempt has ended: its verdicts stay raised, as nothing clears them."""
    last = run.last_attempt()
    return state.final or (last is not None and last.exit_file.exists())
