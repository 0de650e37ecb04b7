"""Heartbeats of the ranks in torch's store, with the last collective of each rank; read only after a failure.

A thread of every rank writes one line every `beat_s`: the heartbeat number and the last collective that the rank entered.
A rank that computes, sleeps or waits continues its heartbeat; a killed or disconnected rank does not. If a collective
fails, a rank can therefore distinguish a late rank from a dead one, at no cost for successful collectives.
"""

import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from toolkit.comm.compat import world_store

BEAT_S = 1.0
_RANKS_A_SECOND = 1000.0  # heartbeats that one store handles without a measurable slowdown
_STORE_PATIENCE_S = 10.0
_HERE, _LEFT, _GAVE_UP = "0", "1", "2"


@dataclass(frozen=True)
class Line:
    """The last line that a rank wrote.

    `left`: the rank closed its communicator or exited normally; `gave_up`: it did so after a failed collective.
    """

    beat: int
    sequence: int
    collective: str
    left: bool = False
    gave_up: bool = False


@dataclass(frozen=True)
class RankObservation:
    """A rank as observed by another: `line` is None if it wrote none; `is_alive` is True if its heartbeat continued."""

    line: Line | None
    is_alive: bool

    def has_entered(self, sequence: int) -> bool:
        """Return whether the rank entered the collective, and is alive or exited normally."""
        return self.line is not None and self.line.sequence >= sequence and (self.is_alive or self.line.left)


def new_board(name: str, rank: int) -> dist.Store:
    """Return a new section ("board") of the store, with its own connection, for the lines of the ranks that create it.

    `rank` is the world rank. Each rank counts its boards per name, so that a second board has its own keys.
    """
    store = world_store()
    return dist.PrefixStore(f"{name}/{store.add(f'{name}/made by {rank}', 1)}", store)


class Presence:
    """Writes this rank's heartbeat line to the board, and reads the lines of the others. Ranks are group ranks."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, beat_s: float = BEAT_S, subject: str = "communicator"
    ) -> None:
        """Write the first line and start the heartbeat. Do not share `store`, because other waits delay the heartbeat.

        `subject` is the name of the object that the ranks create together, for messages.
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
        # Also runs at process exit: a thread that uses the store at that time would crash the process.
        self.close = weakref.finalize(self, _leave, self._stop, self._thread)

    def enter(self, sequence: int, collective: str) -> None:
        """Record that this rank has entered a collective, for the next heartbeat; sends nothing itself."""
        self._entered = (sequence, collective)

    def give_up(self) -> None:
        """Leave after a failed collective; the other ranks then know that this rank entered it and did not cause it."""
        self._gave_up = True
        self.close()

    def observe(self) -> list[RankObservation]:
        """Return the state of every rank, after 2.5 heartbeat intervals: only a second read shows who is alive.

        Raises:
            RuntimeError: the store does not respond.
        """
        time.sleep(self.beat_s / 2)  # by then, a rank that has just entered the collective has written its line
        before = self._read()
        time.sleep(2 * self.beat_s)
        after = self._read()
        return [
            RankObservation(new, is_alive=new is not None and (old is None or new.beat != old.beat))
            for old, new in zip(before, after, strict=True)
        ]

    def _run(self) -> None:
        left = False
        while not left:
            left = self._stop.wait(self.beat_s)
            try:
                self._write(left=left)
            except RuntimeError:
                return  # the store exited with rank 0, so no rank can read this line any more

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
