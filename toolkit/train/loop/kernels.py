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
    """Call `begin` at the start of each step, with infinity after the last one. A failure never ends the run."""

    def __init__(self, world: World) -> None:
        folder = RunDirectory(world.run_dir).attempt(world.attempt).kernels if world.run_dir is not None else None
        self._folder, self._rank, self._looked_s = folder, world.rank, time.monotonic()
        self._first = self._end = float("inf")
        self._profiler: profile | None = None

    def begin(self, number: float) -> None:
        """Start or end the recording if a request requires it."""
        if self._folder is None:
            return
        try:
            if self._profiler is not None and number >= self._end:
                profiler, self._profiler, draft = self._profiler, None, self._folder / f"draft-{self._rank}"
                profiler.stop()
                profiler.export_chrome_trace(str(draft))
                draft.rename(self._folder / f"rank-{self._rank:05}.json")
            elif self._first <= number < float("inf"):
                self._end, self._first = number + self._end - self._first, float("inf")
                gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
                self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
                self._profiler.start()
            elif self._profiler is None and time.monotonic() - self._looked_s >= _PERIOD_S:
                self._looked_s, asked = time.monotonic(), read_json_or_none(self._folder / "request.json")
                if asked is not None and not (self._folder / f"rank-{self._rank:05}.json").exists():
                    self._first, self._end = asked["first_step"], asked["first_step"] + asked["steps"]
        except (OSError, RuntimeError, KeyError, TypeError, ToolkitError) as error:
            self._profiler, self._first = None, float("inf")
            say_beside(f"cannot record kernels: {error}")
