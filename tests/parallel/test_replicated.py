"""Copies of a model: their buckets are chosen by measurement, alike on all ranks."""

from __future__ import annotations

import json
import re

import pytest
from launch import launch, said_by
from parity import LAYOUTS, Layout, difference, job_of, run, train

from toolkit.config.layout_checks import check_combinations
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


def _noting_plan(world, config) -> None:
    """The plan is kept whatever the passes take; each rank writes it, and the buckets that DDP had in the end."""
    from toolkit.parallel import replicated

    plan, measured, prepare = (
        replicated.plan_buckets,
        replicated.ReplicatedPasses._try,
        replicated.ReplicatedPasses.prepare,
    )
    plans, models = [], []

    def tried(self, size_mb, once):
        measured(self, size_mb, once)
        return 1.0 if isinstance(size_mb, float) else 0.5

    replicated.plan_buckets = lambda *given: plans.append(plan(*given)) or plans[-1]
    replicated.ReplicatedPasses._try = tried
    replicated.ReplicatedPasses.prepare = lambda self, once: models.append(self) or prepare(self, once)
    train(world, config)
    buckets = models[0].module._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    (world.run_dir / f"buckets-{world.rank}.json").write_text(json.dumps([plans[0].sizes_bytes, buckets]))


def test_planned_buckets_are_those_of_ddp_and_change_no_sum(tmp_path):
    layout = Layout("planned", 2, {"bucket_mb": "planned"})
    launch(_noting_plan, 2, tmp_path / "planned", job_of(layout), timeout_s=100)
    found = [json.loads((tmp_path / "planned" / f"buckets-{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    planned, buckets = found[0]
    assert ", ".join(map(str, planned)) == buckets
    line = re.search(r"gradient buckets: .* MiB planned; a pass takes .*", said_by(tmp_path / "planned", 0))
    assert line is not None and "ms with 25 MiB: kept" in line.group()
    assert difference(tmp_path / "planned", run(LAYOUTS["replicate 2"], tmp_path / "given")).largest < 1e-6


def test_a_plan_requires_buckets_in_the_order_of_gradients():
    config = job_of(Layout("refused", 2, {"bucket_mb": "planned", "unused_parameters": True}))
    with pytest.raises(ToolkitError, match="DDP keeps its first buckets"):
        check_combinations(config.train, config.parallel)


def test_a_pass_without_overlap_waits_for_each_bucket(tmp_path):
    layout = Layout("no overlap", 2, {"overlap": False})
    launch(_noting_overlap, 2, tmp_path / "no overlap", job_of(layout), timeout_s=100)
    assert said_by(tmp_path / "no overlap", 0).count("reduced before the pass continues: True") >= 3
    assert difference(tmp_path / "no overlap", run(LAYOUTS["replicate 2"], tmp_path / "given")).largest == 0


def _noting_overlap(world, config) -> None:
    import sys

    from torch.nn.parallel import DistributedDataParallel

    plain = DistributedDataParallel.register_comm_hook

    def noting(self, state, hook):
        def noted(given, bucket):
            future = hook(given, bucket)
            sys.stderr.write(f"reduced before the pass continues: {future.done()}\n")
            return future

        noted.__annotations__ = hook.__annotations__
        plain(self, state, noted)

    DistributedDataParallel.register_comm_hook = noting
    train(world, config)


@pytest.mark.parametrize("bucket_mb", [0, -1.0, "large"])
def test_other_sizes_are_refused(bucket_mb):
    with pytest.raises(ToolkitError) as caught:
        job_of(Layout("refused", 2, {"bucket_mb": bucket_mb}))
    assert caught.value.fix == 'use a number above 0, "measured" or "planned"'
