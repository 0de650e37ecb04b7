"""How much of the exchange of gradients is hidden behind the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel

from toolkit.parallel.passes import Passes


class OverlapMeter:
    """How long buckets of gradients are under way while further gradients are computed, by DDP's own clock."""

    def __init__(self, passes: Passes) -> None:
        module = getattr(passes, "module", None)
        self._parallel = module if isinstance(module, DistributedDataParallel) else None

    @property
    def is_known(self) -> bool:
        """False where another than DDP sums gradients: nothing tells when those leave."""
        return self._parallel is not None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, DDP times every backward pass, and not one of a hundred."""
        if self._parallel is None:
            yield
            return
        self._parallel._set_ddp_runtime_logging_sample_rate(1)
        try:
            yield
        finally:
            self._parallel._set_ddp_runtime_logging_sample_rate(100)

    def seconds(self) -> float | None:
        """From the first bucket's departure to the last gradient, in the exchange before the last one."""
        if self._parallel is None:
            return None
        overlap_ns = self._parallel._get_ddp_logging_data().get("backward_compute_comm_overlap_time")
        return None if overlap_ns is None else overlap_ns / 1e9
