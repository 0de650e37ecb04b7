"""The stop request as a rank sees it: a flag set by signals or files, agreed upon at step boundaries."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory

CONTROL_PERIOD_S = 5.0  # a shared file system is asked no more often than this
HEARTBEAT_PERIOD_S = 1.0


@dataclass
class StopWatch:
    """The flag of one rank. `verdict` is what all ranks last agreed on."""

    run: RunDirectory | None = None
    attempt: AttemptDirectory | None = None
    asked: bool = False
    verdict: bool = False
    _looked_at: float = float("-inf")
    _beat_at: float = float("-inf")

    def install(self) -> None:
        """Make USR2 and TERM a stop request. Called before torch is imported, so that no signal is lost."""
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def look(self, step: int, *, rank: int) -> bool:
        """Whether this rank was asked to stop. Rank 0 writes the heartbeat, and looks at files now and then."""
        if rank == 0:
            self._beat(step)
            self._read_control()
        return self.asked

    def _beat(self, step: int) -> None:
        now = time.monotonic()
        if self.attempt is not None and now - self._beat_at >= HEARTBEAT_PERIOD_S:
            self._beat_at = now
            write_json(self.attempt.heartbeat, {"step": step, "time": utc_now()}, durable=False)

    def _read_control(self) -> None:
        now = time.monotonic()
        if self.run is None or self.asked or now - self._looked_at < CONTROL_PERIOD_S:
            return
        self._looked_at = now
        flags: list[Path] = [self.run.control / "stop", self.run.control / "cancel"]
        if self.attempt is not None:
            flags.append(self.attempt.stop_flag)
        self.asked = any(flag.exists() for flag in flags)


def any_rank(asked: bool) -> bool:
    """Whether any rank was asked: a MAX-reduce over the default group. Alone, before there is a group."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return asked
    flag = torch.tensor([asked], dtype=torch.uint8)
    if dist.get_backend() == "nccl":  # a group without gloo can only reduce what is on the GPU
        flag = flag.cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
