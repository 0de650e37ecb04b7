"""The output of a rank, on its way into its own log, or into its node's with the rank before each line."""

import os
import sys
import threading

from toolkit.errors import counted
from toolkit.rundir.files import open_append
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.rank_logs import label_of, log_of

END_S = 2.0  # for remaining output after the rank's exit; a process that it left behind may keep the pipe open
LONGEST_LINE = 1 << 16  # bytes per write; progress bars may not end a line for long


class RankLog:
    """The log of a rank, which replaces standard output and error of this process and of its fork.

    Ranks of a node append whole lines to one file; each node has its own.
    """

    def __init__(self, attempt: AttemptDirectory, rank: int, host: str) -> None:
        ranks = int(os.environ.get("TOOLKIT_WORLD_SIZE") or 1)
        path = log_of(attempt, rank, ranks=ranks, host=host)
        self._log = open_append(path)
        self._label = label_of(rank).encode()
        self._pipe: int | None = None
        self._lost, self._why = 0, ""  # lines lost on a full disk
        self._is_torn = False  # the last written one has no line end
        self._reader: threading.Thread | None = None
        if path == attempt.log_file(rank):
            _become(self._log)
            os.close(self._log)
            return
        self._pipe, inlet = os.pipe()
        _become(inlet)
        os.close(inlet)

    def begin(self) -> None:
        """Start to copy, after the fork: an earlier thread would not exist in the rank."""
        if self._pipe is not None:
            self._reader = threading.Thread(target=self._pass_on, daemon=True)
            self._reader.start()

    def end(self) -> None:
        """Wait for the last lines of the exited rank. Later output of this process is not copied."""
        if self._reader is not None:
            _become(self._log)  # the last of our own write ends
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
