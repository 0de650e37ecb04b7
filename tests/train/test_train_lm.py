"""The shipped job file, the refusals of its arguments, and its picture."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from launch import job, launch, said_by

from toolkit.errors import ToolkitError
from toolkit.jobs import train_lm
from toolkit.metrics.training import TrainRecord, read_train_log

JOB = tomllib.loads(Path(train_lm.__file__).with_name("train_lm.toml").read_text())


def test_the_shipped_job_file_names_every_argument_and_no_other():
    args = train_lm.read_arguments(train_lm.Arguments, JOB["args"])
    assert set(JOB["args"]) == set(asdict(args))


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ToolkitError, match=r"args\.width: args\.width = 128 is not a multiple of args\.heads = 3"):
        train_lm.read_arguments(train_lm.Arguments, {"heads": 3})


@pytest.mark.parametrize(("tied", "head"), [(True, 0), (False, 256 * 32)])
def test_a_tied_head_has_no_weights_of_its_own(tied, head):
    shape = train_lm.Arguments(layers=1, width=32, heads=2, context=16, tied=tied)
    parameters = sum(parameter.numel() for parameter in train_lm.GPT(shape).parameters())
    # Two tables, then per block 12 width^2 in matrices, 5 width of biases and 4 width of norms, then one norm.
    assert parameters == (256 + 16) * 32 + 12 * 32**2 + 9 * 32 + 2 * 32 + head


def train(world, config) -> None:
    train_lm.main(world, config)


def train_on_other_text(world, config) -> None:
    data = config.data.model_copy(update={"paths": [f"text-{world.rank}"]})
    config = config.model_copy(update={"data": data, "job_directory": world.run_dir})
    with pytest.raises(ToolkitError, match="the ranks read different text"):
        train_lm.main(world, config)


def test_ranks_that_read_different_text_are_refused(tmp_path):
    for rank in range(2):
        (tmp_path / f"text-{rank}").write_bytes(bytes([rank]) * 1000)
    launch(train_on_other_text, 2, tmp_path, job())


def train_without_matplotlib(world, config) -> None:
    for name in ["matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))]:
        sys.modules[name] = None  # type: ignore[assignment]
    train_lm.main(world, config)


def test_an_untied_model_learns_and_a_missing_matplotlib_is_said(tmp_path):
    launch(train_without_matplotlib, 1, tmp_path, job(steps=12, args={"tied": False}, log_every=5))
    records = read_train_log(tmp_path / "metrics" / "train.jsonl")
    assert [record.step for record in records] == [5, 10, 12]
    assert records[-1].loss < records[0].loss < 5.6
    assert "matplotlib is not installed; run pip install 'toolkit[plot]'" in said_by(tmp_path, 0)
    assert not (tmp_path / "loss.png").exists()
    assert said_by(tmp_path, 0).startswith("mesh: one rank\n")


def test_rank_0_says_how_ranks_stand_in_the_mesh(tmp_path):
    config = job(steps=2)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"placement": "launched"})})
    launch(train, 2, tmp_path, config)
    assert said_by(tmp_path, 0).startswith("mesh: replicate 2; ranks as launched: by parallel.placement\n")
    assert "mesh: " not in said_by(tmp_path, 1)


def test_the_page_lists_the_columns_of_the_file():
    page = (Path(__file__).parents[2] / "docs" / "train_lm.md").read_text()
    table = page[page.index("| column |") :]
    assert [name for name in TrainRecord.__dataclass_fields__ if f"`{name}`" not in table] == []
