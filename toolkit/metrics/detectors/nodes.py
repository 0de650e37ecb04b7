"""Faults that the samples of a node show: of its GPUs, its network devices and its clock.

`gpu_idle`, `gpu_hot`, `gpu_throttled`, `gpu_ecc`, `link_errors` and `clock_skew`.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median_low

from toolkit.metrics.limits import limit
from toolkit.metrics.samples import ClockSample, GpuSample, LinkSample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, raise_verdict
from toolkit.units import round_duration

__all__ = ["ClockDetector", "GpuDetector", "LinkDetector"]


@dataclass
class _Gpu:
    """What is known of one GPU; the counts are of consecutive samples."""

    ecc_errors: int | None
    busy_s: float  # when it was last busy
    counts: dict[VerdictKind, int] = field(default_factory=dict)

    def count(self, kind: VerdictKind, *, is_true: bool) -> bool:
        """Return whether enough consecutive samples are true."""
        self.counts[kind] = self.counts.get(kind, 0) + 1 if is_true else 0
        return self.counts[kind] >= limit("gpu.samples")


class GpuDetector:
    """Judges the samples of each GPU of the job."""

    clear_after = 30  # samples

    def __init__(self) -> None:
        self._gpus: dict[tuple[str, int], _Gpu] = {}

    def observe(self, sample: GpuSample, *, has_steps: bool) -> list[Verdict]:
        """Return the faults of a GPU; it can be idle only while the ranks finish steps."""
        key = (sample.host, sample.gpu)
        known = self._gpus.setdefault(key, _Gpu(sample.ecc_errors, sample.time_s))
        if sample.busy >= limit("gpu.busy") or not has_steps:
            known.busy_s = sample.time_s
        return list(_faults(known, sample))


def _faults(known: _Gpu, sample: GpuSample) -> Iterator[Verdict]:
    idle_s = sample.time_s - known.busy_s
    known.ecc_errors = sample.ecc_errors if known.ecc_errors is None else known.ecc_errors
    errors = 0 if sample.ecc_errors is None or known.ecc_errors is None else sample.ecc_errors - known.ecc_errors
    if idle_s >= limit("gpu.idle_seconds"):
        yield _verdict(
            VerdictKind.GPU_IDLE, Severity.INFO, sample, f"was idle for {round_duration(idle_s)} while steps continued",
            "request fewer GPUs, or check that each rank uses its own", idle_s=idle_s,
        )  # fmt: skip
    is_hot = 0 < sample.hot_c <= sample.temperature_c + limit("gpu.hot_margin")
    if known.count(VerdictKind.GPU_HOT, is_true=is_hot):
        yield _verdict(
            VerdictKind.GPU_HOT, Severity.WARNING, sample, f"is at {sample.temperature_c:.0f} C",
            f"report its cooling to the site, and exclude the node with --exclude {sample.host}",
            temperature_c=sample.temperature_c, limit_c=sample.hot_c,
        )  # fmt: skip
    if known.count(VerdictKind.GPU_THROTTLED, is_true=bool(sample.throttle)):
        yield _verdict(
            VerdictKind.GPU_THROTTLED, Severity.WARNING, sample, f"lowers its clock: {', '.join(sample.throttle)}",
            f"check it with nvidia-smi -q -d PERFORMANCE, or exclude the node with --exclude {sample.host}",
            temperature_c=sample.temperature_c,
        )  # fmt: skip
    if errors > 0:  # stays raised: the counter does not fall before the driver is loaded again
        yield _verdict(
            VerdictKind.GPU_ECC, Severity.CRITICAL, sample, f"counted {errors} uncorrected memory errors",
            f"exclude the node with --exclude {sample.host}, and report it to the site", errors=errors,
        )  # fmt: skip


def _verdict(
    kind: VerdictKind, severity: Severity, sample: GpuSample, message: str, change: str, **evidence: float
) -> Verdict:
    device = f"gpu {sample.gpu}"
    return raise_verdict(
        kind, severity, f"{device} on node {sample.host} {message}", change, ranks=sample.ranks, host=sample.host,
        device=device, cause=sample.throttle[0] if kind is VerdictKind.GPU_THROTTLED else "", evidence=evidence,
        time_s=sample.time_s,
    )  # fmt: skip


class LinkDetector:
    """Judges the growth of the counters of each device."""

    clear_after = 3  # a look may have no new sample of a node

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str], deque[LinkSample]] = {}

    def observe(self, sample: LinkSample) -> list[Verdict]:
        recent = self._recent.setdefault((sample.host, sample.device), deque())
        if recent and (sample.errors < recent[-1].errors or sample.downs < recent[-1].downs):
            recent.clear()  # an administrator reset the counters
        recent.append(sample)
        while sample.time_s - recent[0].time_s > limit("link.seconds"):
            recent.popleft()
        errors, downs = sample.errors - recent[0].errors, sample.downs - recent[0].downs
        if errors < limit("link.errors") and not downs:
            return []
        what = [f"{errors} errors"] * bool(errors) + [f"{downs} losses of link"] * bool(downs)
        return [
            raise_verdict(
                VerdictKind.LINK_ERRORS, Severity.WARNING,
                f"{sample.device} on node {sample.host} counted {' and '.join(what)} in "
                f"{round_duration(sample.time_s - recent[0].time_s)}",
                f"report the cable to the site, or exclude the node with --exclude {sample.host}", host=sample.host,
                device=sample.device, time_s=sample.time_s, evidence={"errors": errors, "downs": downs},
            )
        ]  # fmt: skip


class ClockDetector:
    """Compares the clock of each node with the median of all nodes; those of one or two with the file server's."""

    clear_after = 3  # samples

    def __init__(self) -> None:
        self._newest: dict[str, ClockSample] = {}

    def observe(self, sample: ClockSample) -> list[Verdict]:
        self._newest[sample.host] = sample
        usual_s = median_low(one.offset_s for one in self._newest.values()) if len(self._newest) > 2 else 0.0
        skew_s = sample.offset_s - usual_s
        if abs(skew_s) <= limit("clock.seconds") + sample.uncertainty_s:
            return []
        others = "those of the other nodes" if len(self._newest) > 2 else "that of the file server"
        direction = "ahead of" if skew_s > 0 else "behind"
        return [
            raise_verdict(
                VerdictKind.CLOCK_SKEW, Severity.INFO,
                f"the clock of node {sample.host} is {abs(skew_s):.2g} s {direction} {others}",
                "check it with chronyc tracking, and report it to the site; times of this node are wrong",
                host=sample.host, time_s=sample.time_s,
                evidence={"skew_s": skew_s, "uncertainty_s": sample.uncertainty_s},
            )
        ]  # fmt: skip
