"""The picture of the loss, of whatever a run has left: drawn without a word of matplotlib's."""

from __future__ import annotations

import warnings

import pytest

from toolkit.metrics.training import TrainLog, TrainRecord
from toolkit.train.picture import draw_loss


def record(step: int, attempt: int) -> TrainRecord:
    return TrainRecord(
        step, steps=2000, loss=1.0 / step, loss_hex=(1.0 / step).hex(), lr=0.1, grad_norm=1.0, samples=step, tokens=step,
        seconds=1.0, tokens_per_s=1.0, time="2026-11-20T14:22:33Z", attempt=attempt, world=2,
    )  # fmt: skip


@pytest.mark.parametrize("steps", [[1], [2000], [10, 1999, 2000]])
def test_a_run_of_any_length_has_room_for_its_picture(tmp_path, steps):
    with TrainLog(tmp_path / "train.jsonl") as log:
        for step in steps:
            log.write(record(step, attempt=step // 2000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_loss(tmp_path / "train.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
