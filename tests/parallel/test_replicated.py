"""Copies of a model: their buckets are chosen by measurement, alike on all ranks."""

from __future__ import annotations

import pytest
from launch import launch, said_by
from parity import LAYOUTS, Layout, difference, job_of, run, train

from toolkit.errors import ToolkitError


def _with_slow_small_buckets(world, config) -> None:
    """Buckets of 1 MiB cost 50 ms a pass, those of 100 MiB as many: only one size is left to choose."""
    import time

    from torch.nn.parallel import DistributedDataParallel

    from toolkit.parallel import replicated

    replicated.TRIED_MB = (1.0, 5.0, 100.0)
    replicated.ReplicatedPasses._sizes_mb = lambda self: list(replicated.TRIED_MB)
    plain = DistributedDataParallel.forward

    def slow(self, *inputs):
        if self.bucket_bytes_cap != 5 * 2**20 and world.rank == 1:  # one rank alone is late
            time.sleep(0.05)
        return plain(self, *inputs)

    DistributedDataParallel.forward = slow
    train(world, config)


def test_measured_buckets_are_those_of_the_fastest_pass_on_the_slowest_rank(tmp_path):
    layout = Layout("measured", 2, {"bucket_mb": "measured"})
    launch(_with_slow_small_buckets, 2, tmp_path / "measured", job_of(layout), timeout_s=100)
    assert "gradient buckets: 5 MiB (a pass took: 1 MiB" in said_by(tmp_path / "measured", 0)
    # One bucket holds this model whatever the size, so that the sums are the same.
    assert difference(tmp_path / "measured", run(LAYOUTS["replicate 2"], tmp_path / "given")).largest == 0


@pytest.mark.parametrize("bucket_mb", [0, -1.0, "large"])
def test_other_sizes_are_refused(bucket_mb):
    with pytest.raises(ToolkitError) as caught:
        job_of(Layout("refused", 2, {"bucket_mb": bucket_mb}))
    assert caught.value.fix == 'use a number above 0, or "measured"'
