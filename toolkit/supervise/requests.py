"""Stop requests that the supervisor receives as signals. Handlers only set flags, which the supervisor evaluates."""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from toolkit.rundir.states import Cause

REASON_S = 10.0  # time for the supervisor to find the reason of a warning, before the ranks receive it
CHECK_S = 10.0  # pause between queries whether a job that received an early warning is being preempted
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
    may_be_early: Callable[[], bool] = bool  # whether Slurm may send SIGUSR2 before `restart.warn_s`
    _obey_at: float = 0.0  # when SIGUSR2 reaches the ranks, unless a cause is known before
    _check_at: float = 0.0

    @property
    def came(self) -> bool:
        """True if the ranks must exit, for any reason."""
        is_warned = self.warned and time.monotonic() >= self._obey_at
        return self.cause is not None or is_warned or self.terminated

    @property
    def needs_reason(self) -> bool:
        """True if the supervisor must find the reason of SIGUSR2 now."""
        return self.warned and self.cause is None and time.monotonic() >= self._check_at

    def hold(self, seconds: float) -> None:
        """Delay SIGUSR2, which Slurm sends up to a minute early; a preemption in the meantime does not wait."""
        self._obey_at = time.monotonic() + seconds
        self._check_at = time.monotonic() + min(seconds, CHECK_S)

    def ask(self, cause: Cause) -> None:
        """Set the cause if there is none yet: a cancel during the grace time of a preemption remains a preemption.

        A cancel overrides a stop, which may give the ranks more time.
        """
        if self.cause is None or (cause is Cause.CANCELLED and self.cause is Cause.STOPPED):
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
            if not self.came:
                self.ask(Cause.STOPPED)
        elif number == signal.SIGTERM:
            self.terminated = True
        elif number == signal.SIGUSR1 or self.is_for_script:
            self.to_pass.append(number)
        else:
            self._check_at = 0.0
            self._obey_at = time.monotonic() + (REASON_S if self.may_be_early() else 0.0)
            self.warned = True  # last, since another thread evaluates `came`
