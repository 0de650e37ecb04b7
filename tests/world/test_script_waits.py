"""A script that only calls `toolkit.step(n)`: how long its ranks wait for each other in DDP and FSDP2."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest
from ring_rows import rows_of

from toolkit.metrics.ring import RingReader, rings_of
from toolkit.metrics.windows import EXPOSED, WORK
from toolkit.rundir.files import write_json

SLEPT_S = 0.4
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import toolkit

kind, rank = sys.argv[1], int(os.environ["TOOLKIT_RANK"]) - 1
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = torch.nn.Linear(8, 8)
if kind == "fsdp":
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
if kind == "compiled":
    model = torch.compile(model, backend="eager")
frames = 0
for number in range(6):
    if kind == "own":
        toolkit.record("exposed_s", 7.0)
    time.sleep(rank * SLEPT_S)
    loss = model(torch.randn(4, 8)).sum()
    loss.backward()
    toolkit.step(number)
    if kind == "compiled" and number == 2:
        frames = torch._dynamo.utils.counters["frames"]["total"]
if kind == "compiled":
    assert frames and torch._dynamo.utils.counters["frames"]["total"] == frames, "compiled again"
dist.barrier()
"""


@pytest.fixture
def waits(run_directory, tmp_path):
    """A function runs the program with two ranks, and returns the rows of each."""

    def rows(kind: str) -> list[list[dict[str, float]]]:
        write_json(tmp_path / "resolved.json", {"observe": {"record": True}})
        run = {"RUN_DIR": str(run_directory.path), "ATTEMPT": "0", "RESOLVED_JOB": str(tmp_path / "resolved.json")}
        variables = os.environ | {f"TOOLKIT_{name}": value for name, value in run.items()} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM.replace("SLEPT_S", str(SLEPT_S)), kind, str(tmp_path / "store")]
        ranks = [subprocess.Popen(command, env=variables | {"TOOLKIT_RANK": str(rank)}) for rank in (1, 2)]
        assert [one.wait(120) for one in ranks] == [0, 0]
        return [
            [row for path in rings_of(run_directory.run_id, 0, rank) for row in rows_of(RingReader(path).new())]
            for rank in (1, 2)
        ]

    yield rows
    for path in rings_of(run_directory.run_id, 0):
        path.unlink()


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "compiled"])
def test_the_waits_for_a_slow_rank_are_not_work(waits, kind):
    fast, slow = waits(kind)
    for measured in (fast, slow):
        assert sum(EXPOSED in row for row in measured) >= 1, measured
    assert statistics.median(row[EXPOSED] for row in fast if EXPOSED in row) > SLEPT_S / 2
    assert all(row[WORK] >= SLEPT_S for row in slow if WORK in row)


def test_waits_that_a_script_records_itself_count(waits):
    assert all(row[EXPOSED] == 7.0 for measured in waits("own") for row in measured)
