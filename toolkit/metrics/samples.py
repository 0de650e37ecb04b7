"""What detectors read besides windows: samples of one moment, `time_s` in seconds since the epoch."""

from dataclasses import dataclass

__all__ = ["ClockSample", "DiskSample", "GpuSample", "LinkSample", "LossSample", "MemorySample", "Sample"]


@dataclass(frozen=True)
class MemorySample:
    """Memory of a rank, every 10 s.

    pool: the memory that runs out: "host", or "gpu" with its index. Several ranks may share it.
    used_bytes: resident memory, or reserved GPU memory, of the rank.
    free_bytes: what is left in the pool: cgroup limit minus use of the cgroup, or free GPU memory.
    """

    time_s: float
    host: str
    rank: int
    pool: str
    used_bytes: float
    free_bytes: float


@dataclass(frozen=True)
class GpuSample:
    """State of a GPU.

    busy: share of time with a running kernel, 0 to 1, since the sample before; before Hopper, of the last second.
    hot_c: the temperature at which the driver lowers the clock; 0 if unknown.
    throttle: the hardware and thermal reasons for a lower clock, such as "hw_thermal"; power caps do not count.
    ecc_errors: uncorrected memory errors since the driver was loaded; None if the GPU does not report them.
    tensor: share of time with active tensor cores, 0 to 1; None before Hopper.
    """

    time_s: float
    host: str
    gpu: int
    ranks: tuple[int, ...]
    busy: float
    temperature_c: float
    hot_c: float = 0.0
    throttle: tuple[str, ...] = ()
    ecc_errors: int | None = None
    tensor: float | None = None


@dataclass(frozen=True)
class LinkSample:
    """Counters of a network device: `errors` is the sum of symbol, receive and discard errors, `downs` of losses of link."""

    time_s: float
    host: str
    device: str
    errors: int
    downs: int = 0


@dataclass(frozen=True)
class ClockSample:
    """Clock of a node minus the clock of the supervisor's node, and the error of that measurement."""

    time_s: float
    host: str
    offset_s: float
    uncertainty_s: float = 0.0


@dataclass(frozen=True)
class DiskSample:
    """The file system of the run directory `path`; `full` is why nothing can be written there, "" if something can."""

    time_s: float
    path: str
    free_bytes: int
    total_bytes: int
    free_inodes: float = 1.0
    full: str = ""


@dataclass(frozen=True)
class LossSample:
    """The loss of one step: that of `ranks` on `host`, or of the job if there are none.

    Losses of ranks other than the lowest are only checked for finite values.
    """

    time_s: float
    step: int
    loss: float
    ranks: tuple[int, ...] = ()
    host: str = ""


Sample = MemorySample | GpuSample | LinkSample | ClockSample | DiskSample | LossSample
