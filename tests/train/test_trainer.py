"""The trainer as the tables ask for it: bad losses, validation, averages, early stops, fp16, callbacks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from launch import job, launch, said_by
from tiny_training import BATCH, STEPS, Model, config_of, initialise, note, samples_at, saved_every, train
from torch import nn

from toolkit.errors import ToolkitError
from toolkit.jobs import train_lm
from toolkit.metrics.validation import read_validations
from toolkit.parallel.materialise import _seed_of

BAD = 29  # a sample of step 8


def with_a_bad_one(samples: range) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = samples_at(samples)
    if BAD in samples:
        targets = targets * math.nan
    return inputs, targets


def with_the_bad_sample(world, config) -> None:
    read: list[int] = []

    def take_samples(samples: range):
        read.extend(samples)
        return with_a_bad_one(samples)

    trainer = train(world, config, take_samples)
    finite = all(bool(parameter.isfinite().all()) for parameter in trainer.model.module.parameters())
    note(world, finite=finite, read=read, step=trainer.state.step, samples=trainer.state.samples)


def test_a_bad_loss_is_skipped_and_said(tmp_path, tiny_training):
    tiny_training.launch(with_the_bad_sample, 2, config_of(guard="skip"))
    assert "step 8: the loss is nan (samples 28 to 31; bad step 1 of 10 allowed): skipping its update" in said_by(
        tmp_path, 0
    )
    assert [tiny_training.findings(rank)["finite"] for rank in (0, 1)] == [True, True]
    assert tiny_training.findings(0)["samples"] == STEPS * BATCH


MARK = 1000.0  # of a target whose gradient is bad, and whose loss is not


def loss_with_a_bad_gradient(kind: str):
    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        marked = bool((targets > MARK / 2).any())
        loss = nn.functional.mse_loss(outputs, targets - MARK * marked)
        nothing = outputs - outputs.detach()
        if marked:
            loss = loss + (nothing.abs().sqrt() if kind == "nan" else 1e4 * nothing).sum()
        return loss

    return loss_of


def with_a_bad_gradient(world, config, kind: str) -> None:
    bad = 29 if kind == "nan" else 45

    def take_samples(samples: range):
        inputs, targets = samples_at(samples)
        return inputs, targets + MARK * (bad in samples)

    trainer = train(world, config, take_samples, loss_of=loss_with_a_bad_gradient(kind))
    finite = all(bool(parameter.isfinite().all()) for parameter in trainer.model.module.parameters())
    note(world, finite=finite)


@pytest.mark.parametrize(
    ("kind", "said", "settings"),
    [
        ("nan", "step 8: the gradient norm is nan (samples 28 to 31; bad step 1 of 10 allowed)", {"clip_norm": 0.0}),
        ("spike", "step 12: the gradient norm is ", {"parallel": {"shard": 2, "zero": 2}}),
    ],
)
def test_a_bad_gradient_behind_a_good_loss_is_skipped_and_said(tmp_path, tiny_training, kind, said, settings):
    tiny_training.launch(with_a_bad_gradient, 2, config_of(guard="skip", **settings), kind)
    assert said in said_by(tmp_path, 0) and said_by(tmp_path, 0).count("skipping its update") == 1
    assert [tiny_training.findings(rank)["finite"] for rank in (0, 1)] == [True, True]
    records = tiny_training.records()
    assert all(math.isfinite(record.loss) and record.loss < 100 for record in records), "no loss shows it"


def test_a_bad_loss_rolls_back_and_goes_past_its_samples(tmp_path, tiny_training):
    config = saved_every(5, config_of(guard="roll_back"))
    tiny_training.launch(with_the_bad_sample, 2, config)
    assert "rolling back to the checkpoint of step 5 and continuing from sample 32" in said_by(tmp_path, 0)
    found = [tiny_training.findings(rank) for rank in (0, 1)]
    assert all(one["finite"] and one["step"] == STEPS for one in found)
    # Steps 6 and 7 were taken twice, with other samples: 20 to 27 are lost with the bad step's own, 28 to 31.
    assert found[0]["samples"] == 32 + (STEPS - 5) * BATCH
    assert (found[0]["read"] + found[1]["read"]).count(BAD) == 1
    records = tiny_training.records()
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert all(math.isfinite(record.loss) for record in records)


def refused(world, config) -> None:
    """Note the mistake that a training ends with."""
    with pytest.raises(ToolkitError) as caught:
        train(world, config, with_a_bad_one)
    error = caught.value
    note(world, message=error.message, where=error.where, fix=error.fix)


def test_a_roll_back_before_the_first_checkpoint_ends_the_run_on_all_ranks(tiny_training):
    tiny_training.launch(refused, 2, saved_every(10, config_of(guard="roll_back")))
    told = tiny_training.findings(0)
    assert told == tiny_training.findings(1)
    assert told["message"].startswith("step 8: the loss is nan (samples 28 to 31; ")
    assert told["message"].endswith(": no checkpoint to roll back to")
    assert told["where"] == "train.guard" and "checkpoint.every_steps" in told["fix"]


@pytest.mark.parametrize("every_steps", [0, STEPS, 100])
def test_a_roll_back_for_which_no_checkpoint_can_be_there_is_refused_at_the_start(tmp_path, tiny_training, every_steps):
    from toolkit.config.layout_checks import check_roll_back

    config = saved_every(every_steps, config_of(guard="roll_back"))
    with pytest.raises(ToolkitError, match=f"checkpoint.every_steps is {every_steps}, train.steps 12") as told:
        check_roll_back(config.train, config.checkpoint, has_one=False)
    assert "from 1 to 11" in told.value.fix
    check_roll_back(config.train, config.checkpoint, has_one=True)
    for sooner in ({"every_s": 60}, {"best": "loss", "best_every_steps": 5}, {"every_steps": 11}):
        check_roll_back(config.train, config.checkpoint.model_copy(update=sooner), has_one=False)
    with pytest.raises(ToolkitError, match="without a run directory"):
        check_roll_back(config.train, None, has_one=False)
    if every_steps == 100:
        tiny_training.launch(refused, 1, config)
        assert tiny_training.findings(0)["where"] == "train.guard"
        assert not (tmp_path / "metrics" / "train.jsonl").exists(), "no step was made"


def test_validation_counts_every_sample_once_and_takes_the_average(tmp_path):
    settings = {"validate_every": 4, "average_decay": 0.8}
    for ranks in (1, 2):
        launch(train, ranks, tmp_path / str(ranks), config_of(**settings))
    one, two = (read_validations(tmp_path / str(ranks) / "metrics" / "validation.jsonl") for ranks in (1, 2))
    assert [(record.step, record.samples, record.average) for record in two] == [
        (4, 10, True),
        (8, 10, True),
        (12, 10, True),
    ]
    for alone, together in zip(one, two, strict=True):
        assert together.means["loss"] == pytest.approx(alone.means["loss"], rel=1e-5)
    launch(train, 1, tmp_path / "own", config_of(validate_every=4))
    own = read_validations(tmp_path / "own" / "metrics" / "validation.jsonl")
    assert own[0].means["loss"] != pytest.approx(one[0].means["loss"], rel=1e-3), "of the weights themselves"


def test_a_run_that_gets_no_better_ends_early_with_a_checkpoint(tmp_path, tiny_training):
    settings = {"validate_every": 2, "early_stop_patience": 2, "early_stop_min_delta": 1e9}
    tiny_training.launch(train, 2, config_of(**settings))
    stopped = "the last 2 validations did not improve on "
    said = said_by(tmp_path, 0)
    assert f"stopped early at step 6: {stopped}" in said and " of step 2 by more than 1e+09\n" in said
    assert (tmp_path / "checkpoints" / "step-00000006").is_dir()
    validations = read_validations(tmp_path / "metrics" / "validation.jsonl")
    assert [bool(record.stopped) for record in validations] == [False, False, True]
    assert validations[-1].stopped.startswith(stopped)
    tiny_training.launch(train, 2, config_of(**settings), attempt=1)
    said = said_by(tmp_path, 0, 1)
    assert "early stopping has already ended this run: the last 2 validations" in said
    assert "to continue it, set train.early_stop_patience = 3 or more" in said
    assert tiny_training.records()[-1].step == 6
    tiny_training.launch(train, 2, config_of(**settings | {"early_stop_patience": 3}), attempt=2)
    assert "stopped early at step 8: the last 3 validations" in said_by(tmp_path, 0, 2)


def _with_the_best_validation(world, config) -> None:
    from toolkit.train.loop.validations import Validations

    made: list[int] = []
    plain = Validations.measure

    def measure_counted(self):
        made.append(1)
        return plain(self)

    Validations.measure = measure_counted
    train(world, config)
    note(world, made=len(made))


def test_the_best_validation_is_looked_at_once_where_one_is_due_anyway(tmp_path, tiny_training):
    config = config_of(validate_every=4)
    best = {"best": "validation_loss", "best_every_steps": 6, "every_steps": 0}
    launch(
        _with_the_best_validation, 1, tmp_path,
        config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=best)}),
    )  # fmt: skip
    # Due after 4, 8 and 12, looked at after 6 and 12.
    assert tiny_training.findings(0)["made"] == 4
    kept = read_validations(tmp_path / "metrics" / "validation.jsonl")[-1].means["loss"]
    saved = json.loads((tmp_path / "metrics" / "checkpoints.jsonl").read_text().splitlines()[-1])
    assert (saved["step"], saved["metric"]) == (12, pytest.approx(kept))


def _with_broken_samples(world, config) -> None:
    """Every sample that a rank takes was replaced."""
    from toolkit.jobs import train_lm
    from toolkit.train.data.text import Windows
    from toolkit.train.trainer import Task, Trainer

    class Broken(Windows):
        skips: tuple[str, ...] = ()

        def take(self, positions):
            self.skips += tuple(f"file:{position}: oops" for position in positions.tolist())
            return super().take(positions)

        def drain_skips(self):
            skips, self.skips = self.skips, ()
            return list(skips)

    shape = train_lm.Arguments(layers=1, width=32, heads=2, context=16)
    source = Broken(bytes(range(256)) * 8, 16)
    task = Task(lambda: train_lm.GPT(shape), train_lm.initialise, train_lm.OUTLINE, train_lm.loss_of, source)
    trainer = Trainer(world, config, task)
    with pytest.raises(ToolkitError) as caught:
        trainer.train()
    note(world, message=caught.value.message, where=caught.value.where, step=trainer.state.step)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}])
def test_broken_samples_are_judged_over_all_ranks_and_end_them_together(tiny_training, parallel):
    """Of 1000 samples 6 may be broken: two ranks have 4 each after two steps, or both have the same 8."""
    config = config_of(parallel=parallel)
    config = config.model_copy(update={"data": config.data.model_copy(update={"broken_limit": 0.006})})
    tiny_training.launch(_with_broken_samples, 2, config)
    for rank in (0, 1):
        told = tiny_training.findings(rank)
        assert told["message"].startswith(
            "8 of 8 samples are broken, more than the allowed fraction 0.006; the last: file:"
        )
        assert (told["where"], told["step"]) == ("data.broken_limit", 1)


def test_fp16_leaves_out_a_step_that_overflows_and_goes_on_with_half_the_scale(tiny_training):
    tiny_training.launch(_in_fp16, 2, config_of(precision="fp16"))
    found = tiny_training.findings(0)
    assert tiny_training.findings(1) == found
    weights, scales = found["weights"], found["scales"]
    assert scales[7] == scales[8] == 2 * scales[9] == 2 * scales[10]
    assert weights[7] != weights[8] == weights[9] != weights[10]


def _in_fp16(world, config) -> None:
    """Rank 1 alone has a gradient that overflows, in the ninth step."""
    from toolkit.train import trainer as module

    weights: list[float] = []
    scales: list[float] = []
    trainers: list[module.Trainer] = []
    plain = module.Trainer.train

    def noted(self) -> None:
        trainers.append(self)
        plain(self)

    def take_samples(samples: range):
        if trainers and samples.start % BATCH in (0, 2):  # the first micro-batch of a step on either rank
            weights.append(float(next(trainers[0].model.module.parameters()).double().sum()))
            scales.append(trainers[0].state.scaler.get_scale())
        inputs, targets = samples_at(samples)
        return inputs, targets * (1e6 if 34 in samples else 0.01)

    module.Trainer.train = noted
    train(world, config, take_samples, held_out=0)
    note(world, weights=weights, scales=scales)


def _with_callbacks(world, config) -> None:
    from toolkit.train.callbacks import Callback

    class Noting(Callback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_begin(self, state) -> None:
            self.seen.append("begin")

        def on_step(self, state, record) -> None:
            self.seen.append(f"step {record.step}")

        def on_validation(self, state, found) -> None:
            self.seen.append(f"validation {state.step}")

        def on_save(self, state, folder) -> None:
            self.seen.append(f"save {state.step} {folder.name if folder else 'begun'}")

        def on_end(self, state, *, stopped) -> None:
            self.seen.append(f"end {stopped}")

    noting = Noting()
    train(world, config, callbacks=[noting])
    note(world, seen=noting.seen)


def test_callbacks_hear_of_every_step_on_all_ranks(tiny_training):
    tiny_training.launch(_with_callbacks, 2, config_of(validate_every=12))
    wanted = ["begin", *(f"step {number}" for number in range(1, 13)), "validation 12"]
    wanted.insert(9, "save 8 step-00000008")
    wanted += ["save 12 step-00000012", "end False"]
    assert tiny_training.findings(0)["seen"] == tiny_training.findings(1)["seen"] == wanted


def _noting_parts(world, config) -> None:
    """Compare what AdaScale was shown with gradients that are worked out one by one."""
    from toolkit.train.optim.adascale import AdaScale

    shown: list[tuple[float, float, int]] = []
    plain = AdaScale.observe

    def observe(self, part_squares: float, mean_square: float, parts: int) -> None:
        shown.append((part_squares, mean_square, parts))
        plain(self, part_squares, mean_square, parts)

    AdaScale.observe = observe
    trainer = train(world, config, held_out=0)
    note(world, shown=shown, gain=trainer.schedule.gain(), step=trainer.state.step)


def test_adascale_is_shown_the_gradients_of_single_micro_batches(tiny_training):
    settings = {
        "lr_scaling": "adaptive",
        "lr_reference_batch": 1,
        "clip_norm": 0.0,
        "optimizer": "sgd",
        "momentum": 0.0,
    }
    tiny_training.launch(_noting_parts, 2, config_of(**settings))
    found = tiny_training.findings(0)
    assert found["shown"] == tiny_training.findings(1)["shown"]
    assert 1.0 < found["gain"] <= BATCH
    assert found["step"] < STEPS, "steps that are worth more end the run sooner"
    model = Model()
    for name, parameter in model.named_parameters():
        torch.manual_seed(_seed_of(7, name))
        initialise(name, parameter.data)
    gradients = []
    for sample in range(BATCH):
        inputs, targets = samples_at([sample])
        parts = torch.autograd.grad(nn.functional.mse_loss(model(inputs), targets), list(model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    squares, mean_square, parts = found["shown"][0]
    assert parts == BATCH
    assert squares == pytest.approx(float(sum(one.square().sum() for one in gradients)) / BATCH, rel=1e-4)
    assert mean_square == pytest.approx(float((sum(gradients) / BATCH).square().sum()), rel=1e-4)


def _read_alike(world, config) -> None:
    """All ranks have the same samples, and all micro-batches, so that there is no noise among them."""
    trainer = train(world, config, lambda samples: samples_at(range(2)), held_out=0)
    note(world, gain=trainer.schedule.gain())


def test_the_gain_of_copies_that_agree_is_one(tiny_training):
    settings = {"lr_scaling": "adaptive", "lr_reference_batch": 2, "optimizer": "sgd", "momentum": 0.0}
    config = job(steps=6, batch=4, micro_batch=2, warmup_steps=0, schedule="constant", **settings)
    tiny_training.launch(_read_alike, 2, config)
    assert tiny_training.findings(0)["gain"] == tiny_training.findings(1)["gain"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("ranks", "parallel", "settings", "where"),
    [
        (2, {"pp": 2}, {"compile": True}, "train.compile"),
        (2, {"pp": 2, "schedule": "zero_bubble"}, {"recompute": "selective"}, "train.recompute"),
        (2, {"tp": 2}, {"compile": True}, "train.compile"),
        (2, {"shard": 2}, {"lr_scaling": "adaptive", "lr_reference_batch": 1}, "train.lr_scaling"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(ranks, parallel, settings, where):
    from toolkit.config.layout_checks import check_combinations

    config = job(steps=STEPS, batch=BATCH, micro_batch=1, parallel={**parallel, "replicate": 0}, **settings)
    with pytest.raises(ToolkitError) as refused:
        check_combinations(config.train, config.parallel)
    assert refused.value.where == where and refused.value.fix


def train_from_other_seeds(world: Any, config: Any) -> None:
    """As ranks begin outside of tests: torch seeds every process at random."""
    torch.manual_seed(1000 + world.rank)
    train_lm.main(world, config)


def test_tensor_parallel_ranks_drop_alike_from_the_rehearsal_on(tiny_training):
    tiny_training.launch(train_from_other_seeds, 2, job(args={"dropout": 0.1}, parallel={"tp": 2}, steps=2))
    assert len(tiny_training.records()) == 2
