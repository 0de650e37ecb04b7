"""Profile the steps that `[train]` selects, and write `profile.json` and `trace.json` in `metrics`."""

import importlib.metadata
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch
import torch.distributed as dist

from toolkit.errors import ToolkitError
from toolkit.metrics.phases import HostClock, Profile
from toolkit.metrics.step_profile import (
    FILE,
    TRACE_FILE,
    PhaseBeside,
    RankProfile,
    Spread,
    StepProfile,
    StepSettings,
    compare,
    summarise,
    write_profile,
)
from toolkit.metrics.trace import ThreadTrace, spans_of_a_rank, traces_of, write_trace
from toolkit.parallel.overlap import OverlapMeter
from toolkit.rundir.files import utc_now
from toolkit.terminal.talk import say
from toolkit.train.loop.step import OptimizerStep
from toolkit.world.facts import World
from toolkit.world.waits import waits_noted


class DeviceClock:
    """Measures time with CUDA events on the current stream; a phase lasts from one event to the next.

    A wait for another stream, such as NCCL's, counts if it delays this stream. Host work counts only if it leaves the
    stream idle.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._anchor()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, marks: Sequence[torch.cuda.Event]) -> list[int]:
        """Return the times of the events; synchronizes with the device once."""
        torch.cuda.synchronize(self._device)
        times = [self._anchor_ns + int(self._anchor_event.elapsed_time(mark) * 1e6) for mark in marks]
        self._anchor()  # elapsed times are 32-bit floats, which lose microseconds after a minute
        return times

    def _anchor(self) -> None:
        self._anchor_event = self.mark()
        self._anchor_event.synchronize()
        self._anchor_ns = time.perf_counter_ns()


class ProfileSettings(Protocol):
    """The keys of `[train]` that profiling reads."""

    batch: int
    micro_batch: int
    profile_steps: int
    profile_from: int


class ProfiledSteps:
    """Profiles some steps of a model. The loop calls `begin` at the start of each step and `end` after the last one.

    The ranks gather and write their measurements after the last profiled step, outside of any step.
    """

    def __init__(self, world: World, settings: ProfileSettings, step: OptimizerStep) -> None:
        self._world, self._settings, self._step = world, settings, step
        self._first = settings.profile_from
        self._behind = settings.profile_from + settings.profile_steps
        self._profile: Profile = step.model.profile
        self._watching = ExitStack()
        self._overlap = OverlapMeter(step.model.passes)
        self._overlaps: list[float] = []
        self._passes = self._tokens = 0
        self._has_step = False  # the recorder of the loop uses the profile in other steps

    @property
    def steps(self) -> range:
        """The steps that are profiled, and the one in which the result is written."""
        return range(self._first, self._behind + 1)

    def begin(self, number: int) -> None:
        """Start step `number`, which ends the previous one. Collective at the first step after the profiled ones."""
        if self._has_step:
            self._end_step()
        if self._first <= number < self._behind:
            if not self._profile.steps:
                self._watch()
            self._profile.begin_step(number)
            self._has_step = True
        elif self._profile.steps:
            self._write()

    def took(self, passes: int, tokens: int) -> None:
        """Record the number of micro-batches of this step on this rank, and its number of tokens over all ranks."""
        self._passes, self._tokens = passes, tokens

    def end(self) -> None:
        """End the last step of the loop. Collective if profiled steps are not written yet."""
        if self._has_step:
            self._end_step()
        if self._profile.steps:
            self._write()

    def _watch(self) -> None:
        profile, device = self._profile, torch.device(self._world.device)
        clock = DeviceClock(self._world.device) if device.type == "cuda" else HostClock()
        profile.use(clock, spans_of_a_rank(self._world.size))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._watching.enter_context(waits_noted(profile))
        self._watching.enter_context(self._overlap.watching())

    def _end_step(self) -> None:
        self._profile.end_step()
        self._has_step = False
        overlap_s = self._overlap.seconds()
        if overlap_s is not None and len(self._profile.steps) > 1:  # DDP reports the overlap of the previous step
            self._overlaps.append(overlap_s)

    def _write(self) -> None:
        self._watching.close()
        profile, world = self._profile, self._world
        step, phases = summarise(profile.steps)
        overlap_s = statistics.fmean(self._overlaps) if self._overlaps else None
        own = RankProfile(world.host, step, phases, overlap_s, *_memory_peaks(world.device))
        traces = traces_of(profile, world.rank, world.host, time.time_ns() - time.perf_counter_ns())
        gathered: list[tuple[RankProfile, list[ThreadTrace]] | None] | None = (
            [None] * world.size if world.rank == 0 else None
        )
        dist.gather_object((own, traces), gathered)
        if gathered is not None:
            known = [one for one in gathered if one is not None]
            self._write_files(self._over_ranks([one for one, _ in known]), [one for _, some in known for one in some])
        profile.forget()
        self._overlaps.clear()

    def _over_ranks(self, ranks: list[RankProfile]) -> StepProfile:
        world, settings, steps = self._world, self._settings, self._profile.steps
        step, phases, work = compare(ranks)
        overlaps = [rank.overlap_s for rank in ranks if rank.overlap_s is not None]
        device_peaks = [rank.peak_device_bytes for rank in ranks if rank.peak_device_bytes is not None]
        defaults = self._step.optimizer.defaults
        fused = bool(defaults["fused"]) if "fused" in defaults else None
        return StepProfile(
            schema_version=1,
            time=utc_now(),
            toolkit=importlib.metadata.version("toolkit"),
            torch=str(torch.__version__),
            device=torch.device(world.device).type,
            ranks=world.size,
            nodes=world.nodes,
            mesh=dict(self._step.model.mesh.sizes),
            settings=StepSettings(settings.batch, settings.micro_batch, self._passes, fused),
            first_step=steps[0].number,
            steps=len(steps),
            tokens_per_step=self._tokens,
            tokens_per_s=self._tokens / step.mean_s,
            step=step,
            phases=phases,
            work=work,
            overlap_s=statistics.fmean(overlaps) if overlaps else None,
            beside=tuple(
                PhaseBeside(thread, name, phase.calls, phase.own_ns / 1e9)
                for thread, sums in self._profile.beside().items()
                for name, phase in sums.items()
            ),
            peak_resident_bytes=Spread.of([rank.peak_resident_bytes for rank in ranks]),
            peak_device_bytes=Spread.of(device_peaks) if device_peaks else None,
            left_out=self._left_out(),
        )

    def _left_out(self) -> tuple[str, ...]:
        """Return what the profile cannot measure."""
        if torch.device(self._world.device).type == "cuda" and not self._overlap.is_known:
            return ("communication: waits for all-gathered parameters, which count as forward and backward",)
        return ()

    def _write_files(self, profile: StepProfile, traces: list[ThreadTrace]) -> None:
        if self._world.run_dir is None:
            sys.stderr.write("no run directory: the step profile is not written\n")
            return
        metrics = self._world.run_dir / "metrics"
        try:
            write_trace(metrics / TRACE_FILE, traces)
            write_profile(metrics / FILE, profile)
        except (OSError, ToolkitError) as error:  # a full disk must not end the run
            say(f"cannot write the step profile: {error}")
            return
        sys.stderr.write(
            f"profiled {profile.steps} steps; result: `toolkit bench step --result {self._world.run_dir.name}`\n"
        )


def _memory_peaks(device: str) -> tuple[int, int | None]:
    """Return the peaks, in bytes, of resident memory since the process start and of GPU memory since the first step."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux
    on_device = torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else None
    return resident, on_device
