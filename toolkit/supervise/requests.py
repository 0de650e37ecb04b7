"""What is asked of an attempt by signals. They only set flags; what they mean is found out later, by asking Slurm."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from types import FrameType

from toolkit.rundir.states import Cause

_HEARD = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@dataclass
class StopRequest:
    """What was asked so far. `cause` is None until it is known what the signals mean."""

    cause: Cause | None = None
    kill: bool = False
    warned: bool = False  # USR2 came
    terminated: bool = False  # TERM came
    interrupted: bool = False  # INT came

    @property
    def came(self) -> bool:
        """True when the ranks are to end, for whatever reason."""
        return self.cause is not None or self.warned or self.terminated

    def ask(self, cause: Cause) -> None:
        """The first request counts: a cancel during a preemption's grace time stays a preemption."""
        if self.cause is None:
            self.cause = cause

    def hear_signals(self) -> None:
        """USR2: the end is near. TERM: Slurm wants us gone. INT: the user at the terminal, twice for now."""
        for number in _HEARD:
            signal.signal(number, self.on_signal)  # an ignored signal, as under nohup, could not be awaited either
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal must not end a run
        # A file server that hangs keeps the main thread in a system call, and Python's handlers run nowhere else.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        while True:
            self.on_signal(signal.sigwait(_HEARD), None)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note one of them."""
        if number == signal.SIGINT:
            self.kill = self.interrupted
            self.interrupted = True
            if not (self.terminated or self.warned):
                self.ask(Cause.STOPPED)
        elif number == signal.SIGTERM:
            self.terminated = True
        else:
            self.warned = True
