"""Stop requests that the supervisor receives as signals. Handlers only set flags, which the supervisor evaluates."""

import signal
import threading
from dataclasses import dataclass, field
from types import FrameType

from toolkit.rundir.states import Cause

_HEARD = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@dataclass
class StopRequest:
    """The requests received so far. `cause` is None until the supervisor knows why the signals were sent."""

    cause: Cause | None = None
    kill: bool = False
    warned: bool = False  # whether SIGUSR2 has arrived
    terminated: bool = False  # whether SIGTERM has arrived
    interrupted: bool = False  # whether SIGINT has arrived
    is_for_script: bool = False  # whether SIGUSR2 is the signal that a batch script requests, and ends nothing
    to_pass: list[int] = field(default_factory=list)  # signals for a batch script

    @property
    def came(self) -> bool:
        """True if the ranks must exit, for any reason."""
        return self.cause is not None or self.warned or self.terminated

    def ask(self, cause: Cause) -> None:
        """Set the cause if there is none yet: a cancel during the grace time of a preemption remains a preemption."""
        if self.cause is None:
            self.cause = cause

    def hear_signals(self) -> None:
        """Handle USR1 (for a script), USR2 (the end is near), TERM (Slurm ends the job) and INT (Ctrl-C; twice: kill)."""
        for number in _HEARD:
            signal.signal(number, self.on_signal)  # sigwait never returns a signal that is ignored, as under nohup
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal must not end a run
        # Python runs handlers only in the main thread, which a hanging file server may block in a system call.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        while True:
            self.on_signal(signal.sigwait(_HEARD), None)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Record one signal."""
        if number == signal.SIGINT:
            self.kill = self.interrupted
            self.interrupted = True
            if not (self.terminated or self.warned):
                self.ask(Cause.STOPPED)
        elif number == signal.SIGTERM:
            self.terminated = True
        elif number == signal.SIGUSR1 or self.is_for_script:
            self.to_pass.append(number)
        else:
            self.warned = True
