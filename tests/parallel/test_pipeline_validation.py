"""A pipeline is validated as one process is: every sample once, for every schedule, and the training goes on as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pipeline_training
import pytest
import torch
from parity import Layout
from real_ranks import run_ranks
from sampling import sampled
from torch import Tensor, nn

from toolkit.errors import ToolkitError
from toolkit.jobs import train_lm
from toolkit.metrics.validation import read_validations
from toolkit.parallel.distribute import DistributedModel
from toolkit.parallel.pipeline_passes import PipelinePasses
from toolkit.train import held_out
from toolkit.train.data.order import share, split
from toolkit.train.held_out import Validation, validate
from toolkit.world.facts import World

BOUND = 1e-6  # relative, of losses in float32 that are sums in another order
SAMPLES = (11, 1)  # not a multiple of anything
ON_2 = [{"schedule": schedule} for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")]
ON_4 = [
    {"pp": 4},
    {"replicate": 2},
    {"shard": 2, "zero": 3},
    {"shard": 2, "zero": 1, "schedule": "interleaved"},
    {"tp": 2, "sequence": True},
]


def validated(model: DistributedModel, samples: int, take: Any, measure: Any = train_lm.measure) -> Validation:
    return validate(
        model.module,
        samples,
        take,
        measure,
        micro_batch=2,
        group=model.mesh.group("replicate", "shard"),
        alone=model.mesh.data_size == 1,
        pipeline=model.pipeline,
    )


def steps_with_validations(world: World, parallel: dict[str, Any]) -> list[float]:
    """The loss of a step, validations, and the loss of the step after."""
    config = pipeline_training.job(parallel, {}, {})
    model, parts = pipeline_training.laid_out(world, config)
    found = []
    for number in range(2):
        samples = share(number * 8, 8, model.mesh.data_rank, model.mesh.data_size)
        found.append(float(parts.step.take([parts.take(some) for some in split(samples, 1)]).loss))
        if number == 0:
            found += [validated(model, samples, parts.take).means["loss"] for samples in (*SAMPLES, SAMPLES[0])]
    assert not any(module.training is False for module in model.module.modules())
    return found


def on_one_process(folder: Path, world: World) -> list[Any]:
    return [steps_with_validations(world, {})]


def on_2_ranks(folder: Path, world: World) -> list[Any]:
    return [steps_with_validations(world, {"ranks": 2, "pp": 2} | case) for case in ON_2]


def on_4_ranks(folder: Path, world: World) -> list[Any]:
    return [steps_with_validations(world, {"ranks": 4, "pp": 2} | case) for case in ON_4]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run_ranks(1, on_one_process, tmp_path_factory.mktemp("alone"))[0][0]


@pytest.mark.parametrize(
    ("ranks", "work", "cases"), sampled([(2, on_2_ranks, ON_2), (4, on_4_ranks, ON_4)], lambda case: case[0] == 2)
)
def test_every_schedule_and_product_finds_what_one_process_finds(alone, tmp_path, ranks, work, cases):
    answers = run_ranks(ranks, work, tmp_path)
    for number, case in enumerate(cases):
        for of_rank in answers:
            assert of_rank[number] == answers[0][number], f"every rank learns the same: {case}"
        assert answers[0][number] == pytest.approx(alone, rel=BOUND), case


def with_the_filling_counted(folder: Path, world: World) -> list[Any]:
    held_out._Pass.places = property(lambda one: slice(None))
    return on_2_ranks(folder, world)[:1]


def with_outputs_out_of_turn(folder: Path, world: World) -> list[Any]:
    tell = PipelinePasses._tell_outputs
    PipelinePasses._tell_outputs = lambda passes, outputs, number: tell(passes, outputs, (number + 1) % 4)
    return on_2_ranks(folder, world)[:1]


@pytest.mark.parametrize(
    "mistake",
    sampled([with_the_filling_counted, with_outputs_out_of_turn], lambda case: case[0] is with_the_filling_counted),
)
def test_a_mistake_exceeds_the_bound(alone, tmp_path, mistake):
    (found,) = run_ranks(2, mistake, tmp_path)[0]
    assert abs(found[1] - alone[1]) > 100 * BOUND * alone[1]


def refused(world: World, take: Any, measure: Any) -> str:
    model, parts = pipeline_training.laid_out(world, pipeline_training.job({"ranks": 2, "pp": 2}, {}, {}))
    try:
        validated(model, 4, lambda samples: take(parts.take(samples)), measure)
    except ToolkitError as error:
        return str(error)
    return ""


def with_changed_inputs(model: nn.Module, samples: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return train_lm.measure(lambda text: model(text.clone()), samples)


def refusals(folder: Path, world: World) -> list[Any]:
    of_measure = ""
    if world.rank == 1:  # the last stage alone measures; the other rank would wait for what it found
        text = torch.zeros(2, 8, dtype=torch.int64)
        passed = held_out._Passed(text, torch.zeros(2, 8, 256))
        try:
            with_changed_inputs(passed, (text, text))
        except ToolkitError as error:
            of_measure = str(error)
    return [refused(world, lambda pair: {"text": pair[0]}, train_lm.measure), of_measure]


def test_what_cannot_go_through_stages_is_refused_with_the_fix(tmp_path):
    answers = run_ranks(2, refusals, tmp_path)
    for samples, _ in answers:
        assert samples.startswith("parallel.pp: expected (inputs, targets), which validation with a pipeline requires")
        assert "got a dict" in samples and "set parallel.pp = 1" in samples
    assert answers[1][1].startswith(
        "parallel.pp: expected the validation function to call the model with the first item"
    )


@pytest.mark.evidence
def test_a_job_validates_its_average_on_sharded_stages(tmp_path):
    """The weights that are validated are the average's, and the training's own are back afterwards."""
    found = {}
    for layout in (Layout("alone", 1), parity.LAYOUTS["pp 2 x shard 2 zero 1"]):
        held_out = Layout(layout.name, layout.ranks, layout.parallel, {"held_out": 0.01})
        found[layout.ranks] = parity.run(held_out, tmp_path / str(layout.ranks), validate_every=2, average_decay=0.5)
    one, four = (list(read_validations(found[ranks] / "metrics" / "validation.jsonl")) for ranks in (1, 4))
    assert [(record.step, record.samples, record.average) for record in four] == [
        (record.step, record.samples, True) for record in one
    ]
    for alone, together in zip(one, four, strict=True):
        assert together.means["loss"] == pytest.approx(alone.means["loss"], rel=1e-5)
    assert parity.difference(found[4], found[1]).largest <= parity.BOUND
