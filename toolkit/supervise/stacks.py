"""Collect the stacks of a stalled attempt: each rank's threads in `errors/rank-R.stack`, and a summary for the log."""

import linecache
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.flight_record import Disagreement, disagreements
from toolkit.metrics.verdicts import names_of_ranks
from toolkit.rundir.files import read_json, write_text
from toolkit.rundir.layout import AttemptDirectory, rank_of
from toolkit.supervise.launchers import Ranks
from toolkit.supervise.rank_files import host_of, named, signal_guards_here

__all__ = ["FINISHED", "NO_STACKS", "Culprit", "culprit_of", "differing_collectives", "main_thread", "ranks_by"]

PATIENCE_S = 5.0
NO_STACKS = "this kind of entry has no stacks: only functions and Python scripts have"
SHOWN_PLACES = 6
_SOURCE = 60  # characters of a line of code in a message
READ_PERIOD_S = 0.5  # the files are complete if they do not grow meanwhile
# faulthandler prints the innermost frame first, and marks the interrupted thread as "Current".
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|/toolkit/(comm|train|checkpoint|world|rank)/|<frozen")
_WRAPPER = "/toolkit/world/waits.py"  # its functions replace those in which ranks wait
FINISHED = "has already finished (exit 0)"
_NO_STACK, _NO_PYTHON = "reported no stack in time", "is not a Python script of the job"
_HELD = re.compile(r"in state (?:[TtDZX] |gone)")  # stopped, traced, hanging in the kernel or dead
# The innermost function of a rank that waits for others, or what the line of the user's code calls: a collective of torch or
# MPI, or the backward pass, in which DDP and FSDP wait.
_WAITING = re.compile(
    r"^(?:all_\w+|\w*barrier|broadcast\w*|reduce\w*|scatter\w*|gather\w*|wait\w*|i?recv|i?send|_engine_run_backward) \(|"
    r"\.(?:wait|backward|(?:all|i)?_?(?:reduce|gather|scatter|to_?all|recv|send|bcast|broadcast|barrier)\w*)\(",
    re.IGNORECASE,
)


def collect_stacks(
    attempt: AttemptDirectory, ranks: Sequence[int], running: Ranks, *, is_unmanaged: bool = False
) -> list[str]:
    """Request stacks, wait for their files, and summarize in a few lines at which position each rank is."""
    for path in (path for rank in ranks for path in (attempt.stack_file(rank), attempt.flight_file(rank))):
        path.unlink(missing_ok=True)  # of an earlier request
    patience_s = PATIENCE_S
    # srun would deliver the signal to all processes of a rank, and so to programs that handle it.
    if (is_unmanaged or not running.ask_for_stacks()) and not signal_guards_here(attempt, signal.SIGUSR1):
        write_text(attempt.stacks_request, socket.gethostname() + "\n")
        patience_s *= 3  # the guards of other nodes check for a request every 5 s, and a file system may show it late
    deadline = time.monotonic() + patience_s
    before: list[int] | None = None
    sizes: list[int] = []
    # A rank writes its file in pieces, and may pause between them.
    while time.monotonic() < deadline and not (all(sizes) and sizes == before):
        before, sizes = sizes, [_size_of(attempt.stack_file(rank)) for rank in ranks]
        time.sleep(READ_PERIOD_S)
    attempt.stacks_request.unlink(missing_ok=True)
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
            place = FINISHED if attempt.done_marker(rank).exists() else _NO_STACK
        found.setdefault(place, []).append(rank)
    return found


def main_thread(text: str) -> str:
    """Return the stack of the main thread from the user's code inwards, or the reason why there is none."""
    lines = _main(text).rstrip().splitlines()
    own = [line.strip() for line in reversed(lines) if not re.search(r"<frozen |/toolkit/rank/|most recent call", line)]
    return "\n".join(own or lines)


def differing_collectives(attempt: AttemptDirectory) -> list[str]:
    """Return what the flight recorders of the ranks show; [] if they are off or agree."""
    return [one.line for one in _disagreements(attempt)]


def _disagreements(attempt: AttemptDirectory) -> list[Disagreement]:
    try:
        files = sorted(attempt.errors.glob("rank-*.flight"))
        return list(disagreements({rank_of(path): read_json(path) for path in files}))
    except (ToolkitError, KeyError, TypeError, ValueError) as error:
        return [Disagreement("", (), f"cannot compare the flight recorders: {error}")]


@dataclass(frozen=True)
class Culprit:
    """The ranks for which all others wait, or () if the stacks do not show them; the reason in one sentence."""

    sentence: str
    cause: str = ""
    ranks: tuple[int, ...] = ()
    host: str = ""


def culprit_of(attempt: AttemptDirectory, ranks: Sequence[int]) -> Culprit:
    """Return what the collected stacks and flight recorders show: who stalls the attempt, in which operation and line."""
    places = ranks_by(_with_source, attempt, ranks)
    held = [rank for place, members in places.items() if _HELD.search(place) for rank in members]
    differing = next((one for one in _disagreements(attempt) if one.ranks), None)
    # A file system may not show every stack yet, so a missing one proves nothing, unless it is the only one.
    absent = [rank for place, members in places.items() if place.endswith((_NO_STACK, _NO_PYTHON)) for rank in members]
    shown = {place: members for place, members in places.items() if members[0] not in absent}
    waiting = {place: members for place, members in shown.items() if _WAITING.search(place)}
    others = sorted(rank for place, members in shown.items() if place not in waiting for rank in members)
    if held:
        return _culprit(attempt, "process_state", held, places)
    if differing is not None:
        return _culprit(attempt, differing.cause, differing.ranks, places, differing.line)
    if waiting and (others or len(absent) == 1):
        return _culprit(attempt, "elsewhere", others or absent, places)
    if places and all(place.endswith(_NO_PYTHON) for place in places):
        return Culprit(NO_STACKS)
    fewest = min(shown.values(), key=len, default=[])
    if len(shown) == 2 and 2 * len(fewest) < sum(map(len, shown.values())):
        return _culprit(attempt, "elsewhere", fewest, places)
    listed = list(places.items())[:SHOWN_PLACES]
    return Culprit("; ".join(f"{named(members)}{_at(place)}" for place, members in listed))


def _at(place: str) -> str:
    return f" {place}" if place == FINISHED else f": {place}"


def _culprit(
    attempt: AttemptDirectory, cause: str, ranks: Sequence[int], places: dict[str, list[int]], line: str = ""
) -> Culprit:
    """Return the culprit with the places of its ranks, and with what all others do."""
    hosts = {host_of(attempt, rank) for rank in ranks}
    host = str(next(iter(hosts)) or "") if len(hosts) == 1 else ""
    own = [place for place, members in places.items() if set(ranks) & set(members)]
    rest = [(place, members) for place, members in places.items() if not set(ranks) & set(members)]
    sentence = names_of_ranks(ranks, host) + _at(", ".join(own[:SHOWN_PLACES]))
    if rest:
        place, members = max(rest, key=lambda one: len(one[1]))
        waits = (" waits" if len(members) == 1 else " wait") + " for it" if own == [FINISHED] else ""
        sentence += f"; {named(members)}{waits}{_at(place)}"
    return Culprit(f"{sentence}; {line}" if line else sentence, cause, tuple(ranks), host)


def innermost(text: str) -> str:
    """Return the innermost frame of the main thread, and the innermost one of the user's own code."""
    frames, own = _frames(text)
    if not frames:
        return text.strip().splitlines()[0] if text.strip() else "reported nothing"
    if any(frame["function"] == "_leave_well" for frame in frames):  # of toolkit.rank: only exit handlers still run
        return FINISHED
    position = f"{frames[0]['function']} ({_short(frames[0])})"
    return position if own is None or own is frames[0] else f"{position}, from {own['function']} ({_short(own)})"


def _frames(text: str) -> tuple[list[re.Match[str]], re.Match[str] | None]:
    """Return the frames of the main thread, and the innermost one of the user's own code."""
    frames = [
        match for line in _main(text).splitlines() if (match := _FRAME.match(line)) and _WRAPPER not in match["file"]
    ]
    return frames, next((frame for frame in frames if not _LIBRARY.search(frame["file"])), None)


def _with_source(text: str) -> str:
    """Return the innermost frames with the line of the user's code, if this node can read it."""
    own = _frames(text)[1] if innermost(text) != FINISHED else None
    source = linecache.getline(own["file"], int(own["line"])).strip() if own else ""
    return f"{innermost(text)}: {source[:_SOURCE]}" if source else innermost(text)


def _main(text: str) -> str:
    """Return the lines of the main thread, which is printed last, whichever thread the signal interrupted."""
    return re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]


def _short(frame: re.Match[str]) -> str:
    return f"{frame['file'].rpartition('/')[2]}:{frame['line']}"
