"""Collect the stacks of a stalled attempt: each rank's threads in `errors/rank-R.stack`, and a summary for the log."""

import re
import signal
import time
from collections.abc import Sequence

from toolkit.errors import ToolkitError
from toolkit.metrics.flight_record import disagreements
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import AttemptDirectory, rank_of
from toolkit.supervise.launchers import Ranks
from toolkit.supervise.rank_files import named, signal_guards_here

PATIENCE_S = 5.0
SHOWN_PLACES = 6
# faulthandler prints the innermost frame first, and marks the interrupted thread as "Current".
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|/toolkit/(comm|train|checkpoint|world|rank)/|<frozen")


def collect_stacks(
    attempt: AttemptDirectory, ranks: Sequence[int], running: Ranks, *, is_unmanaged: bool = False
) -> list[str]:
    """Request stacks, wait for their files, and summarize in a few lines at which position each rank is."""
    for rank in ranks:  # files of an earlier request
        attempt.stack_file(rank).unlink(missing_ok=True)
        attempt.flight_file(rank).unlink(missing_ok=True)
    # srun would deliver the signal to all processes of a rank, and so to programs that handle it.
    if is_unmanaged or not running.ask_for_stacks():
        signal_guards_here(attempt, signal.SIGUSR1)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not all(attempt.stack_file(r).exists() for r in ranks):
        time.sleep(0.1)
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(_place(attempt, rank), []).append(rank)
    fewest_first = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [f"{named(members)}: {position}" for position, members in fewest_first[:SHOWN_PLACES]]
    more = len(places) - SHOWN_PLACES
    lines += [f"and {more} more positions: see {attempt.errors}"] if more > 0 else []
    return [*lines, *differing_collectives(attempt)]


def differing_collectives(attempt: AttemptDirectory) -> list[str]:
    """Return what the flight recorders of the ranks show, [] if they are off or agree."""
    try:
        records = {rank_of(path): read_json(path) for path in sorted(attempt.errors.glob("rank-*.flight"))}
        return list(disagreements(records))
    except (ToolkitError, KeyError, IndexError, TypeError) as error:
        return [f"cannot compare the flight recorders: {error}"]


def _place(attempt: AttemptDirectory, rank: int) -> str:
    try:
        text = attempt.stack_file(rank).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return f"did not respond within {PATIENCE_S:.0f} s"
    return innermost(text)


def innermost(text: str) -> str:
    """Return the innermost frame of the main thread, and the innermost one of the user's own code."""
    # The main thread is printed last, whichever thread the signal interrupted.
    main = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]
    frames = [match for line in main.splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return text.strip().splitlines()[0] if text.strip() else "reported nothing"
    own = next((frame for frame in frames if not _LIBRARY.search(frame["file"])), None)
    position = f"{frames[0]['function']} ({_short(frames[0])})"
    return position if own is None or own is frames[0] else f"{position}, from {own['function']} ({_short(own)})"


def _short(frame: re.Match[str]) -> str:
    return f"{frame['file'].rpartition('/')[2]}:{frame['line']}"
