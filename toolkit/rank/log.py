"""What a rank prints, on its way into a log: a file of its own, or its node's with the rank before each line."""

from __future__ import annotations

import os
import sys
import threading

from toolkit.errors import counted
from toolkit.rundir.files import open_append
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.rank_logs import label_of, log_of

END_S = 2.0  # for what is still on its way when the rank has ended; a process that it left behind may hold on
LONGEST_LINE = 1 << 16  # of one write; progress bars end no line for long


class RankLog:
    """The log of a rank, which standard output and error are from now on, and those of its fork.

    Ranks of a node write to one file through one client, whose appends keep whole lines; nodes have a file each.
    """

    def __init__(self, attempt: AttemptDirectory, rank: int, host: str) -> None:
        ranks = int(os.environ.get("TOOLKIT_WORLD_SIZE") or 1)
        path = log_of(attempt, rank, ranks=ranks, host=host)
        self._log = open_append(path)
        self._label = label_of(rank).encode()
        self._pipe: int | None = None
        self._lost, self._why = 0, ""  # lines that a full disk did not take
        self._is_torn = False  # the last one that it did take has no end
        self._reader: threading.Thread | None = None
        if path == attempt.log_file(rank):
            _become(self._log)
            os.close(self._log)
            return
        self._pipe, inlet = os.pipe()
        _become(inlet)
        os.close(inlet)

    def begin(self) -> None:
        """Pass on what comes, from after the fork: a thread of before it would not be in the rank."""
        if self._pipe is not None:
            self._reader = threading.Thread(target=self._pass_on, daemon=True)
            self._reader.start()

    def end(self) -> None:
        """After the rank has exited: wait for its last lines. Later output of this process is written unchanged."""
        if self._reader is not None:
            _become(self._log)  # the last of our own inlets
            self._reader.join(END_S)
            if self._lost:
                self._write([f"toolkit: {counted(self._lost, 'line')} could not be written here: {self._why}".encode()])

    def _pass_on(self) -> None:
        assert self._pipe is not None
        rest = b""
        while data := os.read(self._pipe, LONGEST_LINE):
            *lines, rest = (rest + data).split(b"\n")
            self._write(lines)
            if len(rest) > LONGEST_LINE:
                self._write([rest])
                rest = b""
        self._write([rest] if rest else [])

    def _write(self, lines: list[bytes]) -> None:
        text = b"\n" * self._is_torn + b"".join(self._label + line + b"\n" for line in lines)
        try:
            while text:
                written = os.write(self._log, text)
                self._is_torn = not text[:written].endswith(b"\n")
                text = text[written:]
        except OSError as error:  # a full disk must not keep the rank from printing
            self._why = str(error.strerror)
            self._lost += min(text.count(b"\n"), len(lines))


def _become(descriptor: int) -> None:
    """Make a descriptor this process's standard output and error."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
