"""Measure how long the gradient all-reduce overlaps with the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel

from toolkit.parallel.passes import Passes

__all__ = ["OverlapMeter"]


class OverlapMeter:
    """Reads from DDP how long gradient buckets are in flight while the backward pass computes further gradients."""

    def __init__(self, passes: Passes) -> None:
        module = getattr(passes, "module", None)
        self._parallel = module if isinstance(module, DistributedDataParallel) else None

    @property
    def is_known(self) -> bool:
        """False unless DDP reduces the gradients; other strategies do not report when a reduction starts."""
        return self._parallel is not None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Make DDP time every backward pass within this context, instead of one in a hundred."""
        if self._parallel is None:
            yield
            return
        self._parallel._set_ddp_runtime_logging_sample_rate(1)
        try:
            yield
        finally:
            self._parallel._set_ddp_runtime_logging_sample_rate(100)

    def seconds(self) -> float | None:
        """Return the time from the start of the first bucket to the last gradient, in the step before the last one."""
        if self._parallel is None:
            return None
        overlap_ns = self._parallel._get_ddp_logging_data().get("backward_compute_comm_overlap_time")
        return None if overlap_ns is None else overlap_ns / 1e9
