"""Copy the output of a batch script to its log in the run directory and to the files of --output and --error."""

import os
import threading
from contextlib import suppress

from toolkit.rank.log import END_S, become
from toolkit.rundir.files import open_append
from toolkit.rundir.layout import AttemptDirectory

_BLOCK = 1 << 16


class ScriptLog:
    """The log of a script, which replaces stdout and stderr of this process and of its fork.

    `outputs` are the descriptors of Slurm's stdout and stderr; they are often the same file.
    """

    def __init__(self, attempt: AttemptDirectory, outputs: tuple[int, int]) -> None:
        for descriptor in outputs:
            os.set_inheritable(descriptor, False)  # the script must not see them
        self._log = open_append(attempt.log_file(0))
        is_one = os.path.samestat(os.fstat(outputs[0]), os.fstat(outputs[1]))
        self._pipes = [(os.pipe(), output) for output in (outputs[:1] if is_one else outputs)]
        self._readers: list[threading.Thread] = []
        become(self._pipes[0][0][1], self._pipes[-1][0][1])
        for (_, inlet), _output in self._pipes:
            os.close(inlet)

    def begin(self) -> None:
        """Start the threads that copy the output; after the fork, which would not copy them."""
        for (outlet, _), output in self._pipes:
            self._readers.append(threading.Thread(target=self._copy, args=(outlet, output), daemon=True))
            self._readers[-1].start()

    def end(self) -> None:
        """Wait for the last output of the script. Later output of this process goes directly to the log."""
        become(self._log, self._log)
        for reader in self._readers:
            reader.join(END_S)

    def _copy(self, outlet: int, output: int) -> None:
        while data := os.read(outlet, _BLOCK):
            for target in (output, self._log):
                with suppress(OSError):  # a full disk must not block the script
                    _write(target, data)


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]
