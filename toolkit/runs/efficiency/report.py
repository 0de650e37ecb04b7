"""Define the report on the efficiency of a run, in seconds and bytes; None means unknown."""

from dataclasses import asdict, dataclass
from typing import Any

from toolkit.metrics.step_advice import Advice
from toolkit.runs.status.state_table import RunStatus


@dataclass(frozen=True)
class Share:
    """The used and the requested amount of a resource, in the same unit."""

    used: float | None = None
    asked: float | None = None

    @property
    def share(self) -> float | None:
        return None if self.used is None or not self.asked else self.used / self.asked


@dataclass(frozen=True)
class GpuUsage:
    """The GPUs of all nodes over the last attempt: shares of time and bytes; an idle one was never busy."""

    count: int
    idle: int
    utilisation: float
    utilisation_peak: float
    memory_peak_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class StepsMade:
    """Steps of all attempts, and those that advanced the run."""

    made: int
    useful: int


@dataclass(frozen=True)
class TaskUsage:
    """One task of an array by its samples: its longest start, its CPU time, the memory of its largest node."""

    task: int
    walltime_s: float
    cpu_share: float | None
    memory_peak_bytes: float


@dataclass(frozen=True)
class Efficiency:
    """The efficiency of a run or a task.

    `walltime_s` is that of the longest start, `cpu_s` the sum of all starts, `memory_bytes` that of the node with the
    highest peak, `memory_mean_bytes` that of the node with the highest mean. `cpus_peak` is the largest number of busy
    CPUs on a node between two samples. `source` is "sacct" or "own samples". `gpus` is None if not sampled.
    """

    status: RunStatus
    source: str
    walltime_s: Share
    cpu_s: Share
    cpus_peak: float | None
    memory_bytes: Share
    memory_mean_bytes: float | None
    gpus: GpuUsage | None
    steps: StepsMade | None
    node_hours: float
    gpu_hours: float
    tasks: tuple[TaskUsage, ...] = ()
    advice: tuple[Advice, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the documented JSON of `efficiency --json`."""
        value = asdict(self)
        del value["status"]
        value["advice"] = [{"flag": one.change, "why": one.said} | asdict(one) for one in self.advice]
        for name in ("walltime_s", "cpu_s", "memory_bytes"):
            value[name]["share"] = getattr(self, name).share
        return {"run_id": self.status.run_id, "state": self.status.state.value, **value}
