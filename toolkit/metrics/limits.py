"""The limits of all detectors, and how often each rule raises a false alarm. Standard library only.

`benchmarks/detectors.py` measures the rates on simulated series; docs and messages quote this table.
"""

from dataclasses import dataclass

__all__ = ["FALSE_ALARMS", "LIMITS", "DetectorLimit", "limit"]


@dataclass(frozen=True)
class DetectorLimit:
    """`name` is "rule.limit"; the rule is a key of `FALSE_ALARMS`."""

    name: str
    value: float
    unit: str
    meaning: str

    @property
    def false_alarms(self) -> str:
        """The measured false-alarm rate of the rule."""
        return FALSE_ALARMS[self.name.partition(".")[0]]


_NOT_MEASURED = "not measured: the rule reads a counter or state"

# Per 10,000 steps with quiet / noisy / ragged work, unless stated otherwise; in parentheses the highest 95 % upper bound
# of the three, which the number of simulated series determines.
FALSE_ALARMS = {
    "straggler": "2 ranks 0 / 0 / 0 (0.015), 3: 0 / 0.04 / 0 (0.09), 4: 0 / 0.01 / 0 (0.03), 8: 0 / 0 / 0 (0.03), "
    "64: 0 / 0 / 0.033 (0.105), 1,024: 0 / 0 / 0 (0.10); nodes 0",
    "throughput": "2 and 8 ranks 0 / 0 / 0 (0.03), 4: 0 / 0 / 0.005 (0.02), 64: 0 / 0.017 / 0 (0.08), 1,024: 0 / 0.033 / 0 (0.16)",
    "imbalance": "0 with quiet work at 2 to 1,024 ranks (0.10)",
    "slow_link": "not simulated; 0 in 10 real runs of 10 min beside a load of 11 to 17 on 2 processors",
    "leak": "per 4 h: flat, sawtooth and random walk 0 (0.015), plateaus 0.06 (0.10)",
    "loss": "0 per 10,000 losses at 1, 3 and 8 % noise (0.10)",
    **dict.fromkeys(
        (
            "advice",
            "block",
            "clock",
            "disk",
            "gpu",
            "link",
            "pressure",
            "request",
            "save",
            "severity",
            "stall",
            "starvation",
        ),
        _NOT_MEASURED,
    ),
}

_ROWS = (
    DetectorLimit("block.steps", 50, "steps", "fewest steps of each rank in a block"),
    DetectorLimit("block.seconds", 10, "s", "shortest block"),
    DetectorLimit("severity.warning", 0.02, "share of time", "cost from which a verdict is a warning"),
    DetectorLimit("severity.critical", 0.25, "share of time", "cost from which a verdict is critical"),
    DetectorLimit("straggler.z", 5, "MAD", "distance from the median rank"),
    DetectorLimit("straggler.median_excess", 0.05, "share", "excess of the median of work over the median rank"),
    DetectorLimit("straggler.mean_excess", 0.10, "share", "excess of the mean of work, for faults of some steps"),
    DetectorLimit("straggler.pair_excess", 0.10, "share", "excess over the other of 2 ranks, which have no MAD"),
    DetectorLimit("straggler.cpu_excess", 0.50, "share", "largest of these limits of CPU time, if ranks wait for CPUs"),
    DetectorLimit("straggler.hits", 4, "of 5 blocks", "blocks that exceed the limits"),
    DetectorLimit("straggler.strict_hits", 5, "of 6 blocks", "the same for 2 ranks, and for many"),
    DetectorLimit("straggler.many", 256, "ranks", "ranks among which bursts of one rank often coincide"),
    DetectorLimit("straggler.wall_excess", 0.02, "share", "least excess in wall time if CPU time triggers the rule"),
    DetectorLimit("straggler.explained", 0.5, "share", "part of the excess that a cause must explain"),
    DetectorLimit("straggler.faults", 50, "per lost s", "major page faults that show missing memory"),
    DetectorLimit(
        "leak.slow_block", 15, "samples of 10 s", "samples of which the minimum counts; the window has 12 blocks"
    ),
    DetectorLimit("leak.fast_block", 3, "samples of 10 s", "the same for leaks that reach the limit soon"),
    DetectorLimit("leak.blocks", 8, "blocks", "fewest blocks for a trend"),
    DetectorLimit("leak.z", 3, "sd", "Mann-Kendall score of the minima"),
    DetectorLimit("leak.third", 0.25, "of the slope", "least slope of each third of the window, against plateaus"),
    DetectorLimit("leak.bytes", 64e6, "bytes", "least growth in the window"),
    DetectorLimit("leak.growth", 0.01, "share", "least growth relative to the use"),
    DetectorLimit("leak.slow_horizon", 86400, "s", "longest time to the limit, if the walltime is not shorter"),
    DetectorLimit("leak.fast_horizon", 900, "s", "longest time to the limit for the short blocks"),
    DetectorLimit("leak.critical", 3600, "s", "time to the limit below which the verdict is critical"),
    DetectorLimit("pressure.info", 0.6, "of the limit", "memory in use that is reported"),
    DetectorLimit("pressure.warning", 0.8, "of the limit", "memory in use that is a warning"),
    DetectorLimit("pressure.margin", 0.05, "of the limit", "distance below these at which the report ends"),
    DetectorLimit("loss.history", 128, "losses", "the previous losses to compare with"),
    DetectorLimit("loss.fewest", 32, "losses", "fewest previous losses"),
    DetectorLimit("loss.mads", 8, "MAD", "distance of a spike from the median loss"),
    DetectorLimit("loss.excess", 0.20, "share", "least excess of a spike and of a divergence"),
    DetectorLimit("loss.row", 3, "losses", "consecutive spikes that may begin a divergence"),
    DetectorLimit("throughput.reference", 10, "blocks", "consecutive blocks that define the best throughput"),
    DetectorLimit("throughput.slack", 0.05, "log ratio", "least slack of the CUSUM"),
    DetectorLimit("throughput.slack_spreads", 2, "spreads", "slack in robust spreads of block differences"),
    DetectorLimit("throughput.alarm", 0.15, "log ratio", "least sum that triggers the rule"),
    DetectorLimit("throughput.alarm_spreads", 6, "spreads", "sum in robust spreads that triggers the rule"),
    DetectorLimit("throughput.block", 0.4, "of the alarm", "most that a single block adds to the sum"),
    DetectorLimit("stall.seconds", 30, "s", "shortest stall"),
    DetectorLimit("stall.medians", 10, "median steps", "shortest stall relative to the newest block of steps"),
    DetectorLimit("stall.longest", 2, "longest steps", "shortest stall relative to the longest of 500 steps"),
    DetectorLimit("stall.critical", 4, "stall limits", "a stall of this length is critical"),
    DetectorLimit("starvation.share", 0.10, "of the step", "waiting for data on the median rank"),
    DetectorLimit("starvation.hits", 4, "of 5 blocks", "blocks that exceed the limit"),
    DetectorLimit("imbalance.waiting", 0.10, "of the step", "mean waiting of the ranks for the slowest one"),
    DetectorLimit("imbalance.variation", 0.10, "share", "95th percentile of work over its median, mean of ranks"),
    DetectorLimit("imbalance.hits", 4, "of 5 blocks", "blocks that exceed both limits"),
    DetectorLimit("imbalance.cpu_wait", 0.25, "of the waiting", "mean wait for a CPU from which the work may be equal"),
    DetectorLimit("imbalance.cpu_variation", 0.75, "of that of work", "least variation of CPU time if work differs"),
    DetectorLimit("imbalance.node", 3, "medians", "wait for a CPU on the node that is named, in 4 of 5 blocks"),
    DetectorLimit("imbalance.entropy", 0.5, "of the maximum", "how often the last rank changes between blocks"),
    DetectorLimit("save.ratio", 2, "median saves", "a slow save, relative to the previous 8"),
    DetectorLimit("save.seconds", 5, "s", "shortest slow save"),
    DetectorLimit("save.share", 0.05, "of an hour", "time spent on saves"),
    DetectorLimit("gpu.busy", 0.05, "of the time", "an idle GPU"),
    DetectorLimit("gpu.idle_seconds", 300, "s", "shortest idle time while steps continue"),
    DetectorLimit("gpu.samples", 2, "samples", "consecutive samples of a hot or throttled GPU"),
    DetectorLimit("gpu.hot_margin", 2, "C", "distance from the temperature at which the driver lowers the clock"),
    DetectorLimit("link.errors", 10, "errors", "growth of error counters in `link.seconds`"),
    DetectorLimit("link.seconds", 600, "s", "interval of the growth"),
    DetectorLimit(
        "slow_link.factor", 3, "medians", "least exposed communication of a step, relative to earlier windows"
    ),
    DetectorLimit("slow_link.share", 0.10, "of the step", "least growth of it"),
    DetectorLimit(
        "slow_link.bytes", 1.5, "medians", "most that a step sends, or else works, relative to earlier windows"
    ),
    DetectorLimit("slow_link.fewest", 6, "windows", "fewest earlier windows of 10 s, of at most 60"),
    DetectorLimit("slow_link.hits", 3, "windows", "consecutive windows that exceed the limits"),
    DetectorLimit("disk.free", 0.05, "of the file system", "free space below which the run directory is nearly full,"),
    DetectorLimit("disk.bytes", 10 * 2**30, "bytes", "unless more than this is free"),
    DetectorLimit("disk.inodes", 0.01, "of the inodes", "free inodes below which it is nearly full"),
    DetectorLimit("clock.seconds", 0.5, "s", "difference between the clocks of nodes, besides its uncertainty"),
    DetectorLimit("advice.communication", 0.20, "of the step", "exposed communication"),
    DetectorLimit("advice.bubble", 0.10, "of the step", "a stage of a pipeline waits for its neighbors"),
    DetectorLimit("advice.optimizer", 0.10, "of the step", "time of the optimizer"),
    DetectorLimit("advice.rest", 0.10, "of the step", "time outside of phases"),
    DetectorLimit("advice.late", 0.10, "of the step", "how much longer the slowest rank works than the median rank"),
    DetectorLimit("advice.unsteady", 2, "median steps", "95th percentile of the step time"),
    DetectorLimit("advice.steady_steps", 20, "steps", "fewest steps for a percentile"),
    DetectorLimit("advice.pass_tokens", 256, "tokens", "fewest tokens of a pass on the CPU (benchmarks/pass_size.py)"),
    DetectorLimit("advice.blocks", 6, "blocks", "a measured gain: fewest blocks before and after the change"),
    DetectorLimit("advice.p", 0.01, "probability", "a measured gain: largest p of the Mann-Whitney test"),
    DetectorLimit("advice.gain", 0.03, "of the step", "least measured gain"),
    DetectorLimit("request.low", 0.5, "of the request", "use below which less should be requested"),
    DetectorLimit("request.margin", 1.3, "of the use", "what to request instead"),
    DetectorLimit("request.high", 0.9, "of the request", "use of memory that risks that Slurm kills the job"),
)

LIMITS = {row.name: row for row in _ROWS}


def limit(name: str) -> float:
    """Return the value of a limit."""
    return LIMITS[name].value
