"""Checkpoints of stages have the whole model's names: a run continues with another cut, or with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pipeline_training
import pytest
from real_ranks import run_ranks
from sampling import sampled, selected

from toolkit.checkpoint import Checkpointer
from toolkit.train.data.order import share, split
from toolkit.train.state import TrainingState
from toolkit.world.facts import World

LAYOUTS = {
    "one": (1, {}),
    "stages": (2, {"pp": 2}),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved"}),
    "sharded stages": (4, {"pp": 2, "shard": 2, "zero": 3}),
}
BOUND = 1e-5  # as in test_pipeline_parity
TEST = "test_a_run_goes_on_in_another_layout"
HALF = pipeline_training.STEPS // 2


def go_on(folder: Path, world: World, layout: str, come_from: str) -> dict[str, Any]:
    """Train half of the steps, from the checkpoint of another layout if there is one, and save."""
    config = pipeline_training.job({"ranks": world.size} | LAYOUTS[layout][1], {}, {})
    model, parts = pipeline_training.laid_out(world, config)
    state = TrainingState(model.module, parts.optimizer, parts.schedule, config.train.seed)
    source = folder / come_from / f"step-{HALF:08d}" if come_from else None
    said = state.resume(Checkpointer(folder / f"{layout} after {come_from}", world), world, source=source)
    losses = []
    for _ in range(HALF):
        samples = share(state.samples, config.train.batch, model.mesh.data_rank, model.mesh.data_size)
        stepped = parts.step.take([parts.take(some) for some in split(samples, config.train.micro_batch)])
        losses.append(float(stepped.loss))
        state.step += 1
        state.samples += config.train.batch
    if not come_from:
        state.save(Checkpointer(folder / layout, world), world)
    return {"said": said, "losses": losses, "optimizer": len(parts.optimizer.state)}


def begin_with_weights(folder: Path, world: World) -> dict[str, Any]:
    """What a run that begins with the weights of one process says, and its first loss."""
    config = pipeline_training.job({"ranks": world.size, "pp": 2}, {}, {})
    model, parts = pipeline_training.laid_out(world, config)
    state = TrainingState(model.module, parts.optimizer, parts.schedule, config.train.seed)
    source = folder / "one" / f"step-{HALF:08d}"
    said = state.resume(Checkpointer(folder / "begun", world), world, source=source, take="weights")
    samples = range(HALF * config.train.batch, (HALF + 1) * config.train.batch)
    stepped = parts.step.take([parts.take(some) for some in split(samples, config.train.micro_batch)])
    return {"said": said, "losses": [float(stepped.loss)]}


def one(folder: Path, world: World) -> list[Any]:
    """One process, uncut, and after each of the others."""
    if not (folder / "one").exists():
        return [go_on(folder, world, "one", "")]
    return [go_on(folder, world, "one", other) for other in LAYOUTS if (folder / other).exists()]


def on_two(folder: Path, world: World) -> list[Any]:
    begun = [go_on(folder, world, layout, "") for layout in ("stages", "interleaved")]
    after = [go_on(folder, world, *names) for names in (("stages", "one"), ("stages", "interleaved"))]
    return [*begun, *after, begin_with_weights(folder, world)]


def on_four(folder: Path, world: World) -> list[Any]:
    return [go_on(folder, world, "sharded stages", come_from) for come_from in ("", "one")]


@pytest.fixture(scope="module")
def losses(request, tmp_path_factory) -> dict[str, list[float]]:
    """Of the second half, by what came first and what went on; "weights" is a run that began with those of one process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(1, one, folder)
    (folder / "answers-one-1").rename(folder / "answers of the first half")
    second = run_ranks(2, on_two, folder)
    is_whole = "one, sharded stages" in [case["course"] for case in selected(request, TEST)]
    four = run_ranks(4, on_four, folder) if is_whole else None
    after = run_ranks(1, one, folder)[0]
    answers = {
        "one, stages": second[0][2],
        "interleaved, stages": second[0][3],
        **{f"{other}, one": answer for other, answer in zip(LAYOUTS, after, strict=is_whole)},
    }
    if four is not None:
        answers["one, sharded stages"] = four[0][1]
    for answer in answers.values():
        assert (
            answer["said"].startswith(f"resumed at step {HALF} from ") and "the checkpoint has no" not in answer["said"]
        )
    assert second[0][4]["said"].startswith("starting at step 0 with the weights of ")
    answers["weights"] = second[0][4]
    return {name: answer["losses"] for name, answer in answers.items()}


@pytest.mark.parametrize(
    "course",
    sampled(
        [
            "one, stages",
            "one, sharded stages",
            "interleaved, stages",
            "stages, one",
            "interleaved, one",
            "sharded stages, one",
        ],
        lambda case: "sharded" not in case[0],
    ),
)
def test_a_run_goes_on_in_another_layout(losses, course):
    assert losses[course] == pytest.approx(losses["one, one"], abs=BOUND)


def test_a_pipeline_begins_with_weights_of_another_layout(losses):
    assert losses["weights"] == pytest.approx(losses["one, one"][:1], abs=BOUND)
