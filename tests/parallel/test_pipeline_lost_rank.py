"""A stage that dies or stalls ends the others, by what gloo hears or by the time-out of their group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pipeline_training
import pytest
import torch.multiprocessing as mp
from real_ranks import one_rank

from toolkit.parallel import pipeline_passes
from toolkit.world.facts import World

TIMEOUT_S = 2


def die() -> None:
    os._exit(0)  # the others are to notice by themselves


def stall() -> None:
    time.sleep(60)
    os._exit(0)


def train_while_one(lost: Callable[[], None], world: World, schedule: str) -> float:
    """Seconds until this rank hears that another one is lost in the middle of its passes."""
    if world.rank == 3:
        loss = pipeline_passes.PipelinePasses._loss
        calls = iter(range(100))
        pipeline_passes.PipelinePasses._loss = lambda *given: lost() if next(calls) == 6 else loss(*given)
    parallel = {"ranks": 4, "pp": 2, "replicate": 2, "schedule": schedule}
    config = pipeline_training.job(parallel, {}, {})
    config = config.model_copy(
        update={"restart": config.restart.model_copy(update={"collective_timeout_s": TIMEOUT_S})}
    )
    begun = time.monotonic()
    with pytest.raises(RuntimeError):
        pipeline_training.trained(world, config)
    return time.monotonic() - begun


def while_one_dies(folder: Path, world: World) -> float:
    return train_while_one(die, world, "1f1b")


def while_one_stalls(folder: Path, world: World) -> float:
    return train_while_one(stall, world, "interleaved")


def answered(folder: Path) -> dict[str, str]:
    """The answers by rank; one that a rank has only begun to write is empty."""
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.name.isdigit()}
    return {name: text for name, text in texts.items() if text}


@pytest.mark.parametrize("work", [while_one_dies, while_one_stalls])
def test_the_others_do_not_wait_for_ever(work, tmp_path):
    answers = tmp_path / "answers"
    answers.mkdir()
    ranks = mp.start_processes(one_rank, (4, work, tmp_path, answers), nprocs=4, start_method="forkserver", join=False)
    until = time.monotonic() + 60
    while time.monotonic() < until and len(answered(answers)) < 3:
        time.sleep(0.05)
    for process in ranks.processes:
        process.kill()
        process.join()
    waited = {name: float(text) for name, text in answered(answers).items()}
    assert waited.keys() == {"0", "1", "2"}
    assert max(waited.values()) < 30, "half of what the stalled one takes, and most of it is the start"
