"""Checkpoints of tensor parallel ranks: any layout goes on from them, and the same layout to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launch import launch, said_by
from sampling import sampled, selected
from tensor_cases import job

from toolkit.checkpoint.contents.differences import tensor_differences
from toolkit.checkpoint.contents.stored_tensors import StoredTensors
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.metrics.training import read_train_log

CUT, STEPS = 2, 4
BOUND = 1e-5
BOTH = {"tp": 2, "shard": 2, "sequence": True}


def config_of(parallel=None, source: Path | None = None, dropout: float = 0.0, steps: int = STEPS):
    args = {"dropout": dropout, "layers": 1}
    config = job(parallel, args, {"steps": steps, "lr": 1e-3, "clip_norm": 0.1, "log_every": 1})
    checkpoint = config.checkpoint.model_copy(update={"every_steps": CUT, "source": str(source or "")})
    return config.model_copy(update={"checkpoint": checkpoint})


def train_all(world, configs) -> None:
    from toolkit.jobs import train_lm

    for name, config in configs.items():
        train_lm.main(replace(world, run_dir=world.run_dir / name), config)


def train(ranks: int, folder: Path, **configs) -> None:
    launch(train_all, ranks, folder, configs)


def at_cut(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step-{CUT:08d}"


def losses(run_dir: Path) -> dict[int, str]:
    return {record.step: record.loss_hex for record in read_train_log(run_dir / "metrics" / "train.jsonl")}


def streams(run_dir: Path) -> set[str]:
    names = read_manifest(at_cut(run_dir)).tensors
    return {name.split(".")[1] for name in names if name.startswith("random.")}


def difference(found: Path, wanted: Path) -> float:
    """The largest relative difference of the losses after the cut, and of a tensor of the model after the last step."""
    a, b = ({step: float.fromhex(loss) for step, loss in losses(run).items() if step > CUT} for run in (found, wanted))
    assert len(a) == STEPS - CUT and a.keys() == b.keys()
    largest = max(abs(a[step] - b[step]) / b[step] for step in a)
    last = [run / "checkpoints" / f"step-{STEPS:08d}" for run in (found, wanted)]
    with StoredTensors(last[0], read_manifest(last[0])) as one, StoredTensors(last[1], read_manifest(last[1])) as other:
        keys = sorted(key for key in other.manifest.tensors if key.startswith("model."))
        assert keys == sorted(key for key in one.manifest.tensors if key.startswith("model.")) and keys
        for tensor in tensor_differences(one, other, keys):
            assert tensor.what == "values" and tensor.numbers is not None, f"{tensor.key}: {tensor.what}"
            largest = max(largest, tensor.numbers.relative_norm)
    return largest


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory) -> Path:
    """Each layout goes on from what others saved, and two with dropout from what they saved themselves."""
    folder = tmp_path_factory.mktemp("tensor_checkpoints")
    train(1, folder, one=config_of())
    configs = {
        "both": config_of(BOTH),
        "drawing": config_of(BOTH, dropout=0.3),
        "drawing_on": config_of(BOTH, at_cut(folder / "drawing"), dropout=0.3),
    }
    names = [case["name"] for case in selected(request, "test_layouts_go_on_from_each_others_checkpoints")]
    if "one_to_both" in names:
        configs["one_to_both"] = config_of(BOTH, at_cut(folder / "one"))
    if "four" in names:
        configs |= {
            "copies": config_of({"replicate": 2, "tp": 2}, dropout=0.3),
            "copies_on": config_of({"replicate": 2, "tp": 2}, at_cut(folder / "copies"), dropout=0.3),
            "four": config_of({"tp": 4}, at_cut(folder / "both")),
        }
    train(4, folder, **configs)
    train(1, folder, both_to_one=config_of(None, at_cut(folder / "both")))
    if "both_to_two" in names:
        train(2, folder, both_to_two=config_of({"tp": 2}, at_cut(folder / "both")))
    return folder


@pytest.mark.parametrize(
    "name",
    sampled(
        ["both", "one_to_both", "four", "both_to_one", "both_to_two"], lambda case: case[0] in ("both", "both_to_one")
    ),
)
def test_layouts_go_on_from_each_others_checkpoints(runs, name):
    assert difference(runs / name, runs / "one") < BOUND


@pytest.mark.parametrize("name", sampled(["drawing", "copies"], lambda case: case[0] == "drawing"))
def test_a_resume_on_the_same_layout_repeats_dropout_and_losses_to_the_last_bit(runs, name):
    after = {step: loss for step, loss in losses(runs / name).items() if step > CUT}
    assert len(after) == STEPS - CUT and losses(runs / f"{name}_on") == after


def test_ranks_of_tp_keep_one_random_stream_together(runs):
    assert streams(runs / "drawing") == {"rank-00000", "rank-00001"}
    assert streams(runs / "one") == {"rank-00000"}


def test_new_shares_of_the_batch_draw_new_streams(runs):
    said = [line for line in said_by(runs, 0).split("\n") if "resumed at" in line]
    assert said and not [line for line in said if "all ranks use" in line]
