"""Stop and save requests of a rank, set by signals or files; the ranks agree on them at step boundaries."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

from toolkit.rundir.files import utc_of, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.terminal.talk import say_beside

__all__ = ["SAVE"]

# The request of a rank. With fewer ranks than STOP, the sum over ranks still distinguishes all three, like the maximum.
GO_ON, SAVE, STOP = 0, 1, 1 << 24
CONTROL_PERIOD_S = 5.0  # seconds between checks of control files, which are on a shared file system
HEARTBEAT_PERIOD_S = 1.0
LATE_S = 0.1  # after the period, so that in a loop of short steps the loop itself writes the heartbeat
END_PERIOD_S = 60.0


@dataclass
class StopWatch:
    """The stop and save requests of one rank. `stop_agreed` and `save_agreed` are what all ranks last agreed on.

    `save_asked` is why this rank requests a save: "asked" if `control/save` exists, or the reason from `ask_save`; ""
    if it requests none. `saves` is False for a script that reports steps, but does not accept stop and save requests.
    """

    run: RunDirectory | None = None
    attempt: AttemptDirectory | None = None
    asked: bool = False
    save_asked: str = ""
    stop_agreed: bool = False
    save_agreed: bool = False
    saves: bool = True
    _ends_at: float | None = None
    _end_read_at: float = float("-inf")
    _looked_at: float = float("-inf")
    _beat_at: float = float("-inf")
    _step: int | None = None  # the last step of rank 0
    _step_at: float = 0.0  # and its time, in seconds since the epoch
    _told_step: int | None = None  # the last step in the heartbeat file
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # of the heartbeat file
    _has_thread: bool = False

    def install(self) -> None:
        """Treat SIGUSR2 and SIGTERM as stop requests. Called before torch is imported, so that no signal is lost."""
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def ask_save(self, why: str) -> None:
        """Request that all ranks save at the next step boundary and continue. Any rank may call it."""
        self.save_asked = self.save_asked or why

    def look(self, step: int, *, rank: int) -> int:
        """Return the request of this rank. Rank 0 also writes the heartbeat and checks control files periodically."""
        if rank == 0:
            for use_files in (lambda: self.beat(step), self._read_control):
                try:
                    use_files()
                except OSError as error:  # a file server that stalls must not end a rank
                    say_beside(f"the run directory does not respond: {error}")
        return STOP if self.asked else SAVE if self.save_asked else GO_ON

    def agree(self, total: int) -> bool:
        """Record the requests of all ranks, as their sum or maximum; return True if they must save now and return."""
        self.stop_agreed, self.save_agreed = total >= STOP, GO_ON < total < STOP
        if total:
            self.save_asked = ""
        if self.stop_agreed:
            self.tell_last_step()
        return self.stop_agreed

    def tell_last_step(self) -> None:
        """Write rank 0's last step to the heartbeat file, whose content may be a second old."""
        if self._step is not None and self._step != self._told_step:
            try:
                self._write_heartbeat()
            except OSError as error:  # this failure must not change how the rank exits
                say_beside(f"the run directory does not respond: {error}")

    def time_left(self) -> float:
        """Return the seconds until the allocation ends, or infinity if it has no time limit."""
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = float(os.environ.get("TOOLKIT_ENDS_AT") or 0)
        if self.attempt is not None and now - self._end_read_at >= END_PERIOD_S:
            self._end_read_at = now
            try:
                self._ends_at = float(self.attempt.ends_at.read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):
                pass  # the file exists only if the end time of the allocation has changed, or it is damaged
            except OSError as error:
                say_beside(f"the run directory does not respond: {error}")
        return self._ends_at - time.time() if self._ends_at else float("inf")

    def beat(self, step: int) -> None:
        """Write the heartbeat, at most once a second. A thread writes the last step of a loop that pauses or hangs."""
        self._step, self._step_at = step, time.time()
        now = time.monotonic()
        if self.attempt is None:
            return
        if now - self._beat_at >= HEARTBEAT_PERIOD_S:
            self._beat_at = now
            self._write_heartbeat()
        elif not self._has_thread:
            self._has_thread = True
            with suppress(RuntimeError):  # no further thread is possible
                threading.Thread(target=self._beat_late, name="heartbeat", daemon=True).start()

    def _beat_late(self) -> None:
        """Write the steps that the loop did not write within the period, until the heartbeat has the last one."""
        with suppress(OSError):  # the next step, or the end of the rank, retries and reports it
            while True:
                time.sleep(max(LATE_S, self._beat_at + HEARTBEAT_PERIOD_S + LATE_S - time.monotonic()))
                # In this order: the thread sees a step that the loop reports meanwhile, or the loop starts another thread.
                self._has_thread = False
                if self._step == self._told_step:
                    return
                self._has_thread = True
                now = time.monotonic()
                if now - self._beat_at >= HEARTBEAT_PERIOD_S:
                    self._beat_at = now
                    self._write_heartbeat()
        self._has_thread = False

    def _write_heartbeat(self) -> None:
        """Write the newest step, which may be newer than that of the caller."""
        with self._lock:
            if self.attempt is None:
                return
            step = self._step
            beat = {"step": step, "time": utc_of(self._step_at), **({} if self.saves else {"saves": False})}
            try:
                write_json(self.attempt.heartbeat, beat, durable=False)
            except OSError:  # for example a full disk; the rank still runs and must not count as stalled
                os.utime(self.attempt.heartbeat)
                raise
            self._told_step = step

    def _read_control(self) -> None:
        now = time.monotonic()
        if self.run is None or self.asked or now - self._looked_at < CONTROL_PERIOD_S:
            return
        self._looked_at = now
        asked = any(map(self.run.is_asked, ("stop", "cancel")))
        if self.attempt is not None:
            asked = asked or self.attempt.stop_flag.exists()
            # If a later attempt exists, the supervisor has given up on this node.
            asked = asked or self.run.attempt(self.attempt.number + 1).path.exists()
        self.asked = self.asked or asked  # a signal may have arrived meanwhile
        save = self.run.control / "save"
        if save.exists():
            save.unlink(missing_ok=True)  # so that the file can request the next save
            self.ask_save("asked")


def largest(asked: int) -> int:
    """Return the largest request of all ranks, by an all-reduce in the default group, or `asked` without a group."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return asked
    flag = torch.tensor([asked], dtype=torch.int64)
    if dist.get_backend() == "nccl":  # NCCL can only reduce GPU tensors
        flag = flag.cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag.item())
