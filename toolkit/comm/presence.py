"""Which ranks live, and how far each has come: a board in the store, read only when something went wrong.

Every rank writes one line on it each `beat_s`, from a thread: the number of the beat, the collective that it entered
last. A rank that computes, sleeps or waits keeps beating; one that was killed or disconnected does not. So a rank whose
collective fails can tell a late rank from a dead one, and no collective pays for it.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from toolkit.comm.compat import world_store

BEAT_S = 1.0
_RANKS_A_SECOND = 1000.0  # beats that one store takes without being felt
_STORE_PATIENCE_S = 10.0
_HERE, _LEFT, _GAVE_UP = "0", "1", "2"


@dataclass(frozen=True)
class Line:
    """What one rank wrote last.

    `left` means that it closed its communicator, or ended, in order; `gave_up` that it did so after a failure.
    """

    beat: int
    sequence: int
    collective: str
    left: bool = False
    gave_up: bool = False


@dataclass(frozen=True)
class Sighting:
    """One rank as seen from another: `line` is None when it never wrote one, `lives` if its beat continued."""

    line: Line | None
    lives: bool

    def came_to(self, sequence: int) -> bool:
        """Whether it entered the collective and is still in it, or has left it."""
        return self.line is not None and self.line.sequence >= sequence and (self.lives or self.line.left)


def new_board(name: str, rank: int) -> dist.Store:
    """A board of its own, in a connection of its own, for the ranks that make one of this name together.

    `rank` is the world's: each counts how many it made, so that the second is not the first one's.
    """
    store = world_store()
    return dist.PrefixStore(f"{name}/{store.add(f'{name}/made by {rank}', 1)}", store)


class Presence:
    """This rank's line on the board, and the lines of the others. Ranks are those of the group."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, beat_s: float = BEAT_S, subject: str = "communicator"
    ) -> None:
        """Write the first line and start to beat. The store should not be shared: a wait in it delays beats.

        `subject` is what the ranks made together, whose collectives these are.
        """
        self.subject = subject
        self._store = store
        self._store.set_timeout(timedelta(seconds=_STORE_PATIENCE_S))
        self._rank = rank
        self._size = size
        self.beat_s = max(beat_s, size / _RANKS_A_SECOND)
        self._entered = (0, f"making the {subject}")
        self._beat = 0
        self._gave_up = False
        self._stop = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()
        # At the end of the process, too: a thread that is inside the store then would end it with a crash.
        self.close = weakref.finalize(self, _leave, self._stop, self._thread)

    def enter(self, sequence: int, collective: str) -> None:
        """Note that this rank has come to a collective. Costs nothing: the next beat tells it."""
        self._entered = (sequence, collective)

    def give_up(self) -> None:
        """Leave after a failed collective: others see that this rank entered it, so its exit is not the cause."""
        self._gave_up = True
        self.close()

    def look(self) -> list[Sighting]:
        """See every rank. Takes two beats and a half, since only a second look shows who lives.

        Raises:
            RuntimeError: the store does not answer.
        """
        time.sleep(self.beat_s / 2)  # who came just now has told it by then
        before = self._read()
        time.sleep(2 * self.beat_s)
        after = self._read()
        return [
            Sighting(new, lives=new is not None and (old is None or new.beat != old.beat))
            for old, new in zip(before, after, strict=True)
        ]

    def _run(self) -> None:
        left = False
        while not left:
            left = self._stop.wait(self.beat_s)
            try:
                self._write(left=left)
            except RuntimeError:
                return  # the store went with rank 0's process; who looks for this rank finds no store either

    def _write(self, *, left: bool = False) -> None:
        self._beat += 1
        sequence, collective = self._entered
        state = _GAVE_UP if self._gave_up and left else _LEFT if left else _HERE
        self._store.set(str(self._rank), f"{self._beat} {sequence} {state} {collective}")

    def _read(self) -> list[Line | None]:
        keys = [str(rank) for rank in range(self._size)]
        if self._store.check(keys):
            return [_parsed(text) for text in self._store.multi_get(keys)]
        return [_parsed(self._store.get(key)) if self._store.check([key]) else None for key in keys]


def _parsed(text: bytes) -> Line:
    beat, sequence, state, collective = text.decode().split(" ", 3)
    return Line(int(beat), int(sequence), collective, state != _HERE, state == _GAVE_UP)


def _leave(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join(_STORE_PATIENCE_S)
