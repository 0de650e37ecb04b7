"""All detectors of a running attempt: windows and samples in, changes of verdicts out. Standard library only."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from toolkit.metrics.blocks import BlockBuilder
from toolkit.metrics.detectors.disk import DiskDetector
from toolkit.metrics.detectors.imbalance import ImbalanceDetector
from toolkit.metrics.detectors.loss import LossDetector, RingLosses
from toolkit.metrics.detectors.memory_leak import MemoryLeakDetector
from toolkit.metrics.detectors.memory_pressure import MemoryPressureDetector
from toolkit.metrics.detectors.network import SlowLinkDetector
from toolkit.metrics.detectors.nodes import ClockDetector, GpuDetector, LinkDetector
from toolkit.metrics.detectors.saves import SaveDetector
from toolkit.metrics.detectors.stall import StallDetector
from toolkit.metrics.detectors.starvation import StarvationDetector
from toolkit.metrics.detectors.straggler import StragglerDetector
from toolkit.metrics.detectors.throughput import ThroughputDetector
from toolkit.metrics.samples import ClockSample, DiskSample, GpuSample, LinkSample, LossSample, MemorySample, Sample
from toolkit.metrics.verdicts import SEVERAL, Verdict, clear_verdict
from toolkit.metrics.windows import DEVICE, DEVICE_PEAK, Window

__all__ = ["Detectors", "OpenVerdicts"]

_MOST_ALIKE = 8  # verdicts of one kind; more are combined into one

T = TypeVar("T")


class OpenVerdicts:
    """The raised verdicts of one detector: reports each once, and clears it after it was absent long enough."""

    def __init__(self, clear_after: int, locate: Callable[[Verdict], Verdict] | None = None) -> None:
        self._clear_after = clear_after
        self._locate = locate  # adds what only a further investigation shows to a verdict that is about to be raised
        self._open: dict[object, Verdict] = {}
        self._absent: dict[object, int] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def update(self, verdicts: Iterable[Verdict], time_s: float) -> list[Verdict]:
        """Return what changed since the previous result of the detector."""
        present: dict[object, Verdict] = {}
        for verdict in self._combined(list(verdicts)):
            present.setdefault(verdict.key, verdict)
        changes = []
        for key, verdict in present.items():
            self._absent.pop(key, None)
            known = self._open.get(key)
            if known is None or verdict.severity.order > known.severity.order:
                self._open[key] = self._locate(verdict) if self._locate is not None else verdict
                if known is not None and known.key != self._open[key].key:
                    changes.append(clear_verdict(known, time_s))
                changes.append(self._open[key])
        for key in [key for key in self._open if key not in present]:
            self._absent[key] = self._absent.get(key, 0) + 1
            if self._absent[key] >= self._clear_after:
                del self._absent[key]
                changes.append(clear_verdict(self._open.pop(key), time_s))
        return changes

    def _combined(self, verdicts: list[Verdict]) -> Iterable[Verdict]:
        """Combine the verdicts of a kind if there are too many of them: 1,024 leaking ranks have one cause."""
        by_kind: dict[str, list[Verdict]] = {}
        for verdict in verdicts:
            by_kind.setdefault(verdict.kind, []).append(verdict)
        for alike in by_kind.values():
            worst = max(alike, key=lambda one: (one.severity.order, one.cost_s_per_hour))
            ranks = tuple(sorted({rank for one in alike for rank in one.ranks}))
            message = f"{worst.message}; the same holds for {len(alike) - 1} others"
            several = replace(worst, ranks=ranks, host="", device=SEVERAL, message=message)
            most = _MOST_ALIKE // 2 if several.key in self._open else _MOST_ALIKE
            is_combined = len({one.key for one in alike}) > most
            yield from [several] if is_combined else alike


class Detectors:
    """All detectors of one attempt. Create one per attempt, and call `observe` every 10 s.

    `peers` maps ranks to groups whose work is equal, such as pipeline stages; ranks are compared within a group. `locate`
    returns a verdict that is about to be raised, with what only a further investigation shows.
    """

    def __init__(
        self, attempt: int, peers: Mapping[int, int] | None = None, locate: Callable[[Verdict], Verdict] | None = None
    ) -> None:
        self._attempt, self._locate = attempt, locate
        self._blocks = BlockBuilder()
        self._straggler, self._imbalance = StragglerDetector(peers), ImbalanceDetector(peers)
        self._of_blocks = (ThroughputDetector(), StarvationDetector(), SaveDetector())
        self._stall, self._leak, self._loss = StallDetector(), MemoryLeakDetector(), LossDetector()
        self._ring_losses = RingLosses()
        self._pressure = MemoryPressureDetector()
        self._gpu, self._link, self._clock = GpuDetector(), LinkDetector(), ClockDetector()
        self._slow_link, self._disk = SlowLinkDetector(), DiskDetector()
        self._allocated: dict[tuple[int, str], float] = {}  # bytes on GPUs, by rank and metric
        self._open: dict[object, OpenVerdicts] = {}
        self._has_steps = False
        self._has_loss_samples = False

    def observe(
        self, slots: Sequence[Window], samples: Sequence[Sample] = (), *, now_s: float,
        walltime_left_s: float | None = None, is_paused: bool = False,
    ) -> list[Verdict]:  # fmt: skip
        """Return the verdicts that new slots of 10 s and samples raise or clear, each once.

        Slots may arrive in any order. `is_paused` tells that a save or validation is running, which is not a stall.
        """
        self._has_steps = self._has_steps or any(slot.steps for slot in slots)
        changes: list[Verdict] = []

        def judge(detector: Any, verdicts: Iterable[Verdict]) -> None:
            opened = self._open.setdefault(detector, OpenVerdicts(detector.clear_after, self._locate))
            changes.extend(opened.update(verdicts, now_s))

        for block in self._blocks.add(slots, now_s):
            judge(self._straggler, self._straggler.observe(block))
            waiting = self._imbalance.observe(block)
            judge(self._imbalance, [] if self._open[self._straggler] else waiting)  # a straggler explains the waiting
            for detector in self._of_blocks:
                judge(detector, detector.observe(block))
        for verdicts in self._slow_link.observe(slots):
            judge(self._slow_link, verdicts)
        for disk in _of(DiskSample, samples):
            judge(self._disk, self._disk.observe(disk))
        judge(self._stall, self._stall.observe(slots, now_s=now_s, is_paused=is_paused))
        memory = _of(MemorySample, samples)
        for slot in slots:
            for name in (DEVICE, DEVICE_PEAK):
                if name in slot.metrics:
                    self._allocated[slot.rank, name] = slot.metrics[name].maximum
        if memory:
            judge(self._pressure, self._pressure.observe([self._without_cache(one, DEVICE_PEAK) for one in memory]))
        leaks = self._leak.observe(
            [self._without_cache(one, DEVICE) for one in memory], walltime_left_s=walltime_left_s
        )
        if leaks is not None:
            judge(self._leak, leaks)
        has_steps = self._has_steps and not self._open[self._stall]
        if gpus := _of(GpuSample, samples):
            judge(self._gpu, [one for gpu in gpus for one in self._gpu.observe(gpu, has_steps=has_steps)])
        if links := _of(LinkSample, samples):
            judge(self._link, [one for link in links for one in self._link.observe(link)])
        if clocks := _of(ClockSample, samples):
            judge(self._clock, [one for clock in clocks for one in self._clock.observe(clock)])
        if losses := self._losses(slots, _of(LossSample, samples), now_s):
            judge(self._loss, [one for loss in losses for one in self._loss.observe(loss)])
        return [replace(verdict, attempt=self._attempt) for verdict in changes]

    def _without_cache(self, sample: MemorySample, metric: str) -> MemorySample:
        """Return a sample of a GPU with what torch allocated there as its use: it can use what it caches again."""
        allocated = self._allocated.get((sample.rank, metric), sample.used_bytes)
        if not sample.pool.startswith("gpu ") or allocated >= sample.used_bytes:
            return sample
        return replace(sample, used_bytes=allocated, free_bytes=sample.free_bytes + sample.used_bytes - allocated)

    def _losses(self, slots: Sequence[Window], samples: list[LossSample], now_s: float) -> list[LossSample]:
        """Return the samples; for programs that report the loss to the ring only, those of their slots.

        Samples are of the loss of the job, which is then also in the rings.
        """
        self._has_loss_samples = self._has_loss_samples or bool(samples)
        of_rings = list(self._ring_losses.samples(slots, now_s))
        if self._has_loss_samples:
            of_rings = [replace(one, ranks=(), host="") for one in of_rings if not math.isfinite(one.loss)]
        return samples + of_rings


def _of(kind: type[T], samples: Iterable[object]) -> list[T]:
    return [sample for sample in samples if isinstance(sample, kind)]
