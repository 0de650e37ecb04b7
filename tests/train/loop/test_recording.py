"""The recorder in the training loop of real ranks: every rank has its steps, and the training does not change."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist
from launch import job, launch
from ring_rows import rows_of
from torch.distributed import _functional_collectives

from toolkit.jobs import train_lm
from toolkit.metrics import recorder
from toolkit.metrics.ring import RingReader, rings_of
from toolkit.metrics.training import read_train_log
from toolkit.metrics.windows import (
    BUBBLE,
    BYTES,
    COLUMNS,
    DATA,
    DEVICE,
    DEVICE_PEAK,
    EXPOSED,
    GRAD_NORM,
    LOSS,
    SAVE,
    STEP,
    TOKENS,
    WORK,
    WORK_CPU,
)

PARAMETER_BYTES = 21_344 * 4  # of the model of `launch.job`
LATE_S = 0.2  # longer than a step takes on a busy machine


def train_as_rank_of_a_run(world: Any, config: Any, record: bool = True, late_rank: int | None = None) -> None:
    """Train as a rank that toolkit started, with a slow loader on one rank, and store what the ring contains."""
    resolved = world.run_dir / f"resolved-{world.rank}.json"
    resolved.write_text(json.dumps({"observe": {"record": record}}))
    run = {"RUN_DIR": str(world.run_dir), "ATTEMPT": "0", "RANK": str(world.rank), "RESOLVED_JOB": str(resolved)}
    os.environ.update({f"TOOLKIT_{name}": value for name, value in run.items()})
    recorder.PHASES_SHARE = 1.0  # phases in every step
    take = train_lm.Windows.take

    def slow(self: Any, *given: Any) -> Any:
        time.sleep(LATE_S if world.rank == late_rank else 0)
        return take(self, *given)

    train_lm.Windows.take = slow
    train_lm.main(world, config)
    assert dist.Work.wait.__name__ == "wait" and _functional_collectives.wait_tensor.__name__ == "wait_tensor"
    rows = []
    for path in rings_of(world.run_dir.name, 0, world.rank):
        rows = rows_of(RingReader(path).new())
        path.unlink()
    (world.run_dir / f"rows-{world.rank}.json").write_text(json.dumps(rows))


def written_rows(run_dir: Path, rank: int) -> list[dict[str, float]]:
    return json.loads((run_dir / f"rows-{rank}.json").read_text())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / f"{tmp_path.name}-{os.getpid()}"  # the name of the rings


@pytest.mark.parametrize("layout", [{}, {"shard": 2}], ids=["replicated", "sharded"])
def test_each_rank_has_its_steps_and_a_late_rank_has_the_work_that_the_other_waits_for(run_dir, layout):
    launch(train_as_rank_of_a_run, 2, run_dir, job(steps=12, parallel=layout, micro_batch=4), True, 1)
    for rank in range(2):
        rows = written_rows(run_dir, rank)
        assert [row["step"] for row in rows] == list(range(1, 13))
        assert set(rows[0]) >= {*COLUMNS} - {SAVE, DEVICE, DEVICE_PEAK, BUBBLE, BYTES}
        assert [BYTES in row for row in rows] == [False] * 2 + [True] * 10
        # Sharded: weights gathered for both passes, and gradients scattered; each sends half to the other rank.
        expected = PARAMETER_BYTES * (1.5 if layout else 1)
        assert {round(row[BYTES], -2) for row in rows[2:]} == {round(expected, -2)}
        assert {row["step"] for row in rows if row[SAVE]} == {8, 12}
        assert all(WORK_CPU in row for row in rows if not row[SAVE])
        assert all({STEP, LOSS, GRAD_NORM} <= row.keys() and row[TOKENS] == 4 * 16 for row in rows)
        rest = [row[STEP] - row[WORK] - row[EXPOSED] for row in rows[1:] if WORK in row and not row[SAVE]]
        assert abs(median(rest)) < 0.1 * median(row[STEP] for row in rows), (
            "work and exposed communication are the step"
        )
    own, late = ([row for row in written_rows(run_dir, rank)[1:] if WORK in row] for rank in range(2))
    assert median(row[DATA] for row in late) >= LATE_S
    assert median(row[WORK] for row in late) >= median(row[WORK] for row in own) + 0.7 * LATE_S
    assert median(row[EXPOSED] for row in own) >= 0.7 * LATE_S


def test_waiting_for_the_neighbors_in_a_pipeline_is_neither_communication_nor_work(run_dir):
    """Two stages that compute equally long idle in a third of each step, with two micro-batches."""
    layout = {"pp": 2}
    launch(train_as_rank_of_a_run, 2, run_dir, job(steps=12, parallel=layout, micro_batch=4, args={"layers": 2}))
    for rank in range(2):
        rows = [row for row in written_rows(run_dir, rank)[2:] if WORK in row and not row[SAVE]]
        assert rows and all(row[BUBBLE] > 0 for row in rows)
        rest = [row[STEP] - row[WORK] - row[EXPOSED] - row[BUBBLE] for row in rows]
        assert abs(median(rest)) < 0.1 * median(row[STEP] for row in rows)


def test_the_recorder_and_the_step_profile_do_not_disturb_each_other(run_dir):
    launch(train_as_rank_of_a_run, 2, run_dir, job(steps=14, profile_from=5, profile_steps=4, log_every=3))
    profile = json.loads((run_dir / "metrics" / "profile.json").read_text())
    assert (profile["first_step"], profile["steps"]) == (5, 4)
    assert len(json.loads((run_dir / "metrics" / "trace.json").read_text())["traceEvents"]) > 100
    rows = written_rows(run_dir, 0)
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert [row["step"] for row in rows if LOSS in row] == [3, 6, 9, 12, 14]
    assert not any(WORK in row for row in rows[4:9])


def test_the_recorder_changes_no_bit_of_the_training_and_can_be_off(run_dir):
    losses = []
    for record in (True, False):
        folder = run_dir.with_name(f"{run_dir.name}-{record}")
        launch(train_as_rank_of_a_run, 2, folder, job(steps=8), record)
        losses.append([one.loss_hex for one in read_train_log(folder / "metrics" / "train.jsonl")])
        assert len(written_rows(folder, 1)) == (8 if record else 0)
    assert losses[0] == losses[1]
