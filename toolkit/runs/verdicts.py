"""Read the verdicts on a run, which its supervisor writes while the run is active."""

from toolkit.errors import ToolkitError
from toolkit.metrics.detectors.disk import with_disk
from toolkit.metrics.verdicts import Severity, Verdict, line_of_verdict, open_verdicts, read_verdicts
from toolkit.metrics.window_file import WindowReader
from toolkit.metrics.windows import NOT_MEASURED, ONE_RANK_READ, WORK
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState

__all__ = ["all_verdicts", "are_past", "raised_verdicts", "unmeasured", "verdict_lines"]


def all_verdicts(run: RunDirectory) -> list[Verdict]:
    """Return all changes of verdicts, oldest first; [] if there were none. ToolkitError if the file is damaged."""
    try:
        return read_verdicts(run.metrics / "verdicts.jsonl")
    except FileNotFoundError:
        return []


def raised_verdicts(run: RunDirectory) -> list[Verdict]:
    """Return the raised verdicts of the last attempt, the most severe first; without those of a damaged file.

    `toolkit verdict` names the damaged line; it must not hide the state of a run.
    """
    last = run.last_attempt()
    try:
        raised = open_verdicts(all_verdicts(run), last.number) if last is not None else []
    except (ToolkitError, OSError):
        raised = []
    is_over = last is None or last.exit_file.exists()
    return raised if is_over else with_disk(raised, run.path)


def unmeasured(run: RunDirectory) -> str:
    """Return which faults of the last attempt no verdict can name, because its ranks do not report enough; "" if none."""
    attempt = run.last_attempt()
    begun = StartRecord.read(attempt) if attempt is not None else None
    if attempt is None or begun is None or begun.ranks < 2:
        return ""
    names: list[str] = []
    for path in sorted(attempt.windows.glob("rank-*.bin"))[:1]:  # all ranks run the same program
        reader = WindowReader(path)
        try:
            reader.contents()
        except (ToolkitError, OSError):
            return ""
        names = reader.names
    if not names or WORK in names:
        return ""
    # Only for steps that are read from the output of rank 0, the heartbeat has their rate.
    return ONE_RANK_READ if "steps_per_s" in (read_json_or_none(attempt.heartbeat) or {}) else NOT_MEASURED


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
