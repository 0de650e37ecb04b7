"""Record the kernels of the steps that `toolkit trace --kernels` requests while a run is active."""

import time

import torch
from torch.profiler import ProfilerActivity, profile

from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import RunDirectory
from toolkit.terminal.talk import say_beside
from toolkit.world.facts import World

_PERIOD_S = 5.0  # between checks for a request, which is on a shared file system


class KernelSteps:
    """Call `begin` at the start of each step, with None after the last one. A failure never ends the run."""

    def __init__(self, world: World) -> None:
        self._attempt = RunDirectory(world.run_dir).attempt(world.attempt) if world.run_dir is not None else None
        self._rank, self._looked_s, self._end = world.rank, time.monotonic(), 0
        self._steps = range(0)
        self._profiler: profile | None = None

    def begin(self, number: int | None) -> None:
        """Start or end the recording if it is due."""
        if self._attempt is None:
            return
        try:
            if self._profiler is not None:
                if number is None or number >= self._end:
                    self._write(self._profiler)
            elif number is not None and self._steps and number >= self._steps.start:
                self._end, self._steps = number + len(self._steps), range(0)
                devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
                self._profiler = profile(activities=[ProfilerActivity.CPU, *devices])
                self._profiler.start()
            elif time.monotonic() - self._looked_s >= _PERIOD_S:
                self._looked_s, request = time.monotonic(), read_json_or_none(self._attempt.kernels_request)
                if request is not None and not self._attempt.kernels_file(self._rank).exists():
                    self._steps = range(request["first_step"], request["first_step"] + request["steps"])
        except (OSError, RuntimeError, KeyError, TypeError, ToolkitError) as error:
            self._profiler = None
            say_beside(f"cannot record kernels: {error}")

    def _write(self, profiler: profile) -> None:
        self._profiler = None
        profiler.stop()
        path = self._attempt.kernels_file(self._rank)  # type: ignore[union-attr]
        draft = path.with_suffix(".draft")
        profiler.export_chrome_trace(str(draft))
        draft.rename(path)
