"""Requests to an attempt by signals. Handlers only set flags; the supervisor finds out later what they mean."""

import signal
import threading
from dataclasses import dataclass
from types import FrameType

from toolkit.rundir.states import Cause

_HEARD = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@dataclass
class StopRequest:
    """The requests so far. `cause` is None until the meaning of the signals is known."""

    cause: Cause | None = None
    kill: bool = False
    warned: bool = False  # USR2 arrived
    terminated: bool = False  # TERM arrived
    interrupted: bool = False  # INT arrived

    @property
    def came(self) -> bool:
        """True if the ranks are to exit, for any reason."""
        return self.cause is not None or self.warned or self.terminated

    def ask(self, cause: Cause) -> None:
        """The first request counts: a cancel during a preemption's grace time stays a preemption."""
        if self.cause is None:
            self.cause = cause

    def hear_signals(self) -> None:
        """Install the handlers. USR2: the end is near. TERM: Slurm ends the job. INT: the user at the terminal; twice: now."""
        for number in _HEARD:
            signal.signal(number, self.on_signal)  # an ignored signal, as under nohup, could not be received later
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal must not end a run
        # A hanging file server keeps the main thread in a system call, and Python runs its handlers in no other thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        while True:
            self.on_signal(signal.sigwait(_HEARD), None)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Record one of them."""
        if number == signal.SIGINT:
            self.kill = self.interrupted
            self.interrupted = True
            if not (self.terminated or self.warned):
                self.ask(Cause.STOPPED)
        elif number == signal.SIGTERM:
            self.terminated = True
        else:
            self.warned = True
