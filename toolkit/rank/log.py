"""Write the output of a rank to its own log, or to the log of its node, with the rank number before each line."""

import os
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path

from toolkit.errors import counted
from toolkit.rundir.files import open_append
from toolkit.rundir.layout import AttemptDirectory
from toolkit.rundir.rank_logs import label_of, log_of
from toolkit.terminal.talk import say_beside

COPY_S = 0.2  # between copies of a file to another one
END_S = 2.0  # maximum wait for output after the rank exits, since a process that it started may keep the pipe open
LONGEST_LINE = 1 << 16  # bytes; longer lines are split, since progress bars may not end a line for a long time


class RankLog:
    """The log of a rank, which replaces stdout and stderr of this process and of its fork.

    If the log is shared by the ranks of a node, each rank appends whole lines to it.
    """

    def __init__(self, attempt: AttemptDirectory, rank: int, host: str) -> None:
        ranks = int(os.environ.get("TOOLKIT_WORLD_SIZE") or 1)
        self.path = path = log_of(attempt, rank, ranks=ranks, host=host)
        self._log = open_append(path)
        self._label = label_of(rank).encode()
        self._pipe: int | None = None
        self._lost, self._why = 0, ""  # number of lines lost on a full disk, and why
        self._is_torn = False  # whether the last line written lacks its newline
        self._reader: threading.Thread | None = None
        if path == attempt.log_file(rank):
            _become(self._log, self._log)
            os.close(self._log)
            return
        self._pipe, inlet = os.pipe()
        _become(inlet, inlet)
        os.close(inlet)

    def begin(self) -> None:
        """Start the thread that copies output to the log; after the fork, which would not copy the thread."""
        if self._pipe is not None:
            self._reader = threading.Thread(target=self._pass_on, daemon=True)
            self._reader.start()

    def end(self) -> None:
        """Wait for the last lines of the exited rank. Later output of this process goes directly to the log."""
        if self._reader is not None:
            _become(self._log, self._log)  # this closes the last write end of the pipe in this process
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
        except OSError as error:  # drop lines on a full disk, so that the rank does not block
            self._why = str(error.strerror)
            self._lost += min(text.count(b"\n"), len(lines))


class ScriptLog:
    """The log of a script, which replaces stdout and stderr of this process and of its fork.

    `outputs` are the descriptors of Slurm's stdout and stderr; they are often the same file.
    """

    def __init__(self, attempt: AttemptDirectory, outputs: tuple[int, ...]) -> None:
        for descriptor in outputs:
            os.set_inheritable(descriptor, False)  # the script must not see them
        self.path = attempt.log_file(0)
        self._log = open_append(self.path)
        files = outputs[:1] if os.path.samestat(*map(os.fstat, outputs)) else outputs
        pipes = [os.pipe() for _ in files]
        self._readers = [
            threading.Thread(target=self._copy, args=(outlet, file), daemon=True)
            for (outlet, _), file in zip(pipes, files, strict=True)
        ]
        _become(pipes[0][1], pipes[-1][1])
        for _, inlet in pipes:
            os.close(inlet)

    def begin(self) -> None:
        """Start the threads that copy the output; after the fork, which would not copy them."""
        for reader in self._readers:
            reader.start()

    def end(self) -> None:
        """Wait for the last output of the script. Later output of this process goes directly to the log."""
        _become(self._log, self._log)
        for reader in self._readers:
            reader.join(END_S)

    def _copy(self, outlet: int, file: int) -> None:
        while data := os.read(outlet, 1 << 16):
            for target in (file, self._log):
                rest = data
                with suppress(OSError):  # a full disk must not block the script
                    while rest:
                        rest = rest[os.write(target, rest) :]


class DefaultLog:
    """The log of a script without --output: `shown` in the working directory, as sbatch creates it.

    The script writes to this file itself, and may read, move or remove it; a thread copies it to the log of the run.
    """

    def __init__(self, attempt: AttemptDirectory, shown: Path) -> None:
        self.path = attempt.log_file(0)
        self._log = open_append(self.path)
        # A link in a folder of several users must not select the file that is written and made accessible.
        self._shown = os.open(shown, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.fchmod(self._shown, stat.S_IMODE(os.fstat(self._log).st_mode))
        self._copied = os.fstat(self._shown).st_size  # by earlier starts
        self._is_over = threading.Event()
        self._copier = threading.Thread(target=self._copy, daemon=True)
        _become(self._shown, self._shown)

    def begin(self) -> None:
        """Start the thread that copies the file; after the fork, which would not copy the thread."""
        self._copier.start()

    def end(self) -> None:
        """Copy the last output of the script. Later output of this process goes directly to the log."""
        _become(self._log, self._log)
        self._is_over.set()
        self._copier.join(END_S)

    def _copy(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(COPY_S)
            with suppress(OSError):  # on a full disk, this file lacks what the other one has
                self._copied = min(self._copied, os.fstat(self._shown).st_size)  # the script may have truncated it
                while data := os.pread(self._shown, 1 << 16, self._copied):
                    self._copied += len(data)
                    os.write(self._log, data)


def default_log(attempt: AttemptDirectory, name: str) -> DefaultLog | None:
    """Return the log of a script for which sbatch would create the file `name`; None if it cannot be created."""
    try:
        return DefaultLog(attempt, Path(name)) if name else None
    except OSError as error:
        say_beside(f"cannot create {name} in {Path.cwd()}: {error.strerror}; `toolkit logs` shows the output")
        return None


def _become(output: int, error: int) -> None:
    """Redirect stdout and stderr of this process to two descriptors."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(output, 1)
    os.dup2(error, 2)
