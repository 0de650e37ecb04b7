"""Network devices whose error counters rise: `link_errors`."""

from collections import deque

from toolkit.metrics.limits import limit
from toolkit.metrics.samples import LinkSample
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, raise_verdict
from toolkit.units import round_duration

__all__ = ["LinkDetector"]


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
