"""Collect the stacks of a stalled attempt: each rank's threads in `errors/rank-R.stack`, and a summary for the log."""

import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.flight_record import disagreements
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import AttemptDirectory, rank_of
from toolkit.supervise.launchers import Ranks
from toolkit.supervise.rank_files import named, signal_guards_here

__all__ = ["differing_collectives", "main_thread", "ranks_by"]

PATIENCE_S = 5.0
SHOWN_PLACES = 6
_UNCHANGED = 3  # readings in a row, after which the files are complete
# faulthandler prints the innermost frame first, and marks the interrupted thread as "Current".
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|/toolkit/(comm|train|checkpoint|world|rank)/|<frozen")


def collect_stacks(
    attempt: AttemptDirectory, ranks: Sequence[int], running: Ranks, *, is_unmanaged: bool = False
) -> list[str]:
    """Request stacks, wait for their files, and summarize in a few lines at which position each rank is."""
    for path in (path for rank in ranks for path in (attempt.stack_file(rank), attempt.flight_file(rank))):
        path.unlink(missing_ok=True)  # of an earlier request
    # srun would deliver the signal to all processes of a rank, and so to programs that handle it.
    if is_unmanaged or not running.ask_for_stacks():
        signal_guards_here(attempt, signal.SIGUSR1)
    deadline = time.monotonic() + PATIENCE_S
    sizes: list[int] = []
    unchanged = 0
    while (
        time.monotonic() < deadline and unchanged < _UNCHANGED
    ):  # a rank writes its file in pieces, and may pause between them
        before, sizes = sizes, [_size_of(attempt.stack_file(rank)) for rank in ranks]
        unchanged = unchanged + 1 if all(sizes) and sizes == before else 0
        time.sleep(0.1)
    places = ranks_by(innermost, attempt, ranks)
    fewest_first = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [f"{named(members)}: {position}" for position, members in fewest_first[:SHOWN_PLACES]]
    more = len(places) - SHOWN_PLACES
    lines += [f"and {more} more positions: see {attempt.errors}"] if more > 0 else []
    return [*lines, *differing_collectives(attempt)]


def _size_of(path: Path) -> int:
    """Return the size of a file of whole lines, else 0."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return 0
    return len(text) if text.endswith(b"\n") else 0


def ranks_by(form: Callable[[str], str], attempt: AttemptDirectory, ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return the ranks by a form of their stacks, or by the reason why they have none."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        try:
            place = form(attempt.stack_file(rank).read_text(encoding="utf-8", errors="replace"))
        except FileNotFoundError:
            why = "has exited" if attempt.done_marker(rank).exists() else "its guard or node hangs, or got no signal"
            place = f"did not respond within {PATIENCE_S:.0f} s: {why}"
        found.setdefault(place, []).append(rank)
    return found


def main_thread(text: str) -> str:
    """Return the stack of the main thread from the user's code inwards, or the reason why there is none."""
    lines = _main(text).rstrip().splitlines()
    own = [line.strip() for line in reversed(lines) if not re.search(r"<frozen |/toolkit/rank/|most recent call", line)]
    return "\n".join(own or lines)


def differing_collectives(attempt: AttemptDirectory) -> list[str]:
    """Return what the flight recorders of the ranks show; [] if they are off or agree."""
    try:
        files = sorted(attempt.errors.glob("rank-*.flight"))
        return list(disagreements({rank_of(path): read_json(path) for path in files}))
    except (ToolkitError, KeyError, TypeError, ValueError) as error:
        return [f"cannot compare the flight recorders: {error}"]


def innermost(text: str) -> str:
    """Return the innermost frame of the main thread, and the innermost one of the user's own code."""
    frames = [match for line in _main(text).splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return text.strip().splitlines()[0] if text.strip() else "reported nothing"
    own = next((frame for frame in frames if not _LIBRARY.search(frame["file"])), None)
    position = f"{frames[0]['function']} ({_short(frames[0])})"
    return position if own is None or own is frames[0] else f"{position}, from {own['function']} ({_short(own)})"


def _main(text: str) -> str:
    """Return the lines of the main thread, which is printed last, whichever thread the signal interrupted."""
    return re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]


def _short(frame: re.Match[str]) -> str:
    return f"{frame['file'].rpartition('/')[2]}:{frame['line']}"
