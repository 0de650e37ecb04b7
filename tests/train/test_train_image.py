"""The shipped image job learns what it holds out, on any layout; its page's commands run."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from launch import launch
from sampling import sampled

from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.jobs import train_image
from toolkit.metrics.training import read_train_log
from toolkit.metrics.validation import read_validations

JOB = Path(train_image.__file__).with_name("train_image.toml")
PAGE = Path(__file__).parents[2] / "docs" / "train_image.md"


def test_the_job_file_names_every_argument():
    assert set(tomllib.loads(JOB.read_text())["args"]) == set(asdict(train_image.Arguments()))


def train(world, config) -> None:
    train_image.main(world, config)


@pytest.mark.parametrize("count", sampled([2, 3], lambda case: case[0] == 2))
def test_the_pages_commands_learn_the_digits(tmp_path, count):
    """By forked ranks: a command of its own for each costs the imports of all its ranks."""
    commands = [line.split("#")[0].split() for line in re.findall(r"^toolkit run .*$", PAGE.read_text(), re.MULTILINE)]
    assert len(commands) == 3
    losses = []
    for number, command in enumerate(commands[:count]):
        words = [*command[3:], "--set", "train.steps=60", "--set", "train.validate_every=30"]
        flags = {"job.ranks_per_node": Flag(int(words[1]), "test")} if words[0] == "-n" else {}
        settings = [after for word, after in pairwise(words) if word == "--set"]
        config = resolve_job(JOB, site=None, environ={}, flags=flags, settings=settings)
        run_dir = tmp_path / str(number)
        launch(train, config.job.ranks_per_node, run_dir, config)
        losses.append([record.loss for record in read_train_log(run_dir / "metrics" / "train.jsonl")])
        last = read_validations(run_dir / "metrics" / "validation.jsonl")[-1]
        assert last.samples == 359 and last.average
        assert last.means["accuracy"] > 0.8
    # The sums' last bits grow.
    assert all(one[:5] == pytest.approx(losses[0][:5], rel=1e-4) for one in losses[1:])
