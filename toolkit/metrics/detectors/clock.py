"""Nodes whose clocks differ from those of the others: `clock_skew`."""

from statistics import median_low

from toolkit.metrics.limits import limit
from toolkit.metrics.samples import ClockSample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, raise_verdict

__all__ = ["ClockDetector"]


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
