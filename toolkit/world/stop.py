"""Stop requests of a rank: a flag set by signals or files, agreed upon at step boundaries."""

import os
import signal
import time
from dataclasses import dataclass
from types import FrameType

from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.terminal.talk import say_beside

__all__ = ["SAVE"]

# The request of a rank. The sum over fewer ranks than STOP, like the maximum, still distinguishes all three.
GO_ON, SAVE, STOP = 0, 1, 1 << 24
CONTROL_PERIOD_S = 5.0  # seconds between checks of a shared file system
HEARTBEAT_PERIOD_S = 1.0
END_PERIOD_S = 60.0


@dataclass
class StopWatch:
    """The flag of one rank. `verdict` and `save_agreed` are the last agreement of all ranks.

    `save_asked` is why this rank requests a save: "asked" for a file, or the reason of `ask_save`; "" if it does not.
    """

    run: RunDirectory | None = None
    attempt: AttemptDirectory | None = None
    asked: bool = False
    save_asked: str = ""
    verdict: bool = False
    save_agreed: bool = False
    _ends_at: float | None = None
    _end_read_at: float = float("-inf")
    _looked_at: float = float("-inf")
    _beat_at: float = float("-inf")
    _step: int | None = None  # the last step of rank 0
    _told_step: int | None = None  # the last in the heartbeat

    def install(self) -> None:
        """Make USR2 and TERM a stop request. Called before torch is imported, so that no signal is lost."""
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def ask_save(self, why: str) -> None:
        """Request that all ranks save at the next step boundary and continue. Any rank may call it."""
        self.save_asked = self.save_asked or why

    def look(self, step: int, *, rank: int) -> int:
        """Return the request of this rank. Rank 0 writes the heartbeat and checks files periodically."""
        if rank == 0:
            self._step = step
            for use_files in (lambda: self._beat(step), self._read_control):
                try:
                    use_files()
                except OSError as error:  # a pause of a file server must not end a rank
                    say_beside(f"the run directory does not respond: {error}")
        return STOP if self.asked else SAVE if self.save_asked else GO_ON

    def agree(self, total: int) -> bool:
        """Record the requests of all ranks, as their sum or maximum; return True if they must save now and return."""
        self.verdict, self.save_agreed = total >= STOP, GO_ON < total < STOP
        if total:
            self.save_asked = ""
        if self.verdict:
            self.tell_last_step()
        return self.verdict

    def tell_last_step(self) -> None:
        """Write rank 0's last step into the heartbeat, which may be a second behind."""
        if self._step is not None and self._step != self._told_step:
            try:
                self._write_heartbeat(self._step)
            except OSError as error:  # it does not change how this rank ends
                say_beside(f"the run directory does not respond: {error}")

    def time_left(self) -> float:
        """Return the seconds until the allocation ends; infinite without a limit."""
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = float(os.environ.get("TOOLKIT_ENDS_AT") or 0)
        if self.attempt is not None and now - self._end_read_at >= END_PERIOD_S:
            self._end_read_at = now
            try:
                self._ends_at = float(self.attempt.ends_at.read_text(encoding="utf-8"))
            except FileNotFoundError:
                pass  # the file does not exist until the end changes
            except OSError as error:
                say_beside(f"the run directory does not respond: {error}")
        return self._ends_at - time.time() if self._ends_at else float("inf")

    def _beat(self, step: int) -> None:
        now = time.monotonic()
        if self.attempt is not None and now - self._beat_at >= HEARTBEAT_PERIOD_S:
            self._beat_at = now
            try:
                self._write_heartbeat(step)
            except OSError:  # a full disk; the rank still runs and must not count as stalled
                os.utime(self.attempt.heartbeat)
                raise

    def _write_heartbeat(self, step: int) -> None:
        if self.attempt is not None:
            write_json(self.attempt.heartbeat, {"step": step, "time": utc_now()}, durable=False)
            self._told_step = step

    def _read_control(self) -> None:
        now = time.monotonic()
        if self.run is None or self.asked or now - self._looked_at < CONTROL_PERIOD_S:
            return
        self._looked_at = now
        asked = any(map(self.run.is_asked, ("stop", "cancel")))
        if self.attempt is not None:
            asked = asked or self.attempt.stop_flag.exists()
            # The supervisor has given up this node: a later attempt has the run.
            asked = asked or self.run.attempt(self.attempt.number + 1).path.exists()
        self.asked = self.asked or asked  # a signal may have arrived meanwhile
        save = self.run.control / "save"
        if save.exists():
            save.unlink(missing_ok=True)  # done: the next request is a new one
            self.ask_save("asked")


def largest(asked: int) -> int:
    """Return the largest request of the ranks, by a MAX-reduce over the default group, or this rank's own without a
    group.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return asked
    flag = torch.tensor([asked], dtype=torch.int64)
    if dist.get_backend() == "nccl":  # a group without gloo can only reduce what is on the GPU
        flag = flag.cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag.item())
