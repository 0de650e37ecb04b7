"""The shipped image job learns what it holds out, on any layout; its page's commands run."""

from __future__ import annotations

import re
import shutil
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from toolkit.jobs import train_image
from toolkit.metrics.training import read_train_log
from toolkit.metrics.validation import read_validations

JOB = Path(train_image.__file__).with_name("train_image.toml")
PAGE = Path(__file__).parents[2] / "docs" / "train_image.md"


def test_the_job_file_names_every_argument():
    assert set(tomllib.loads(JOB.read_text())["args"]) == set(asdict(train_image.Arguments()))


@pytest.mark.timeout(300)
def test_the_pages_commands_learn_the_digits(toolkit, monkeypatch):
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    commands = [line.split("#")[0].split() for line in re.findall(r"^toolkit run .*$", PAGE.read_text(), re.MULTILINE)]
    assert len(commands) == 3
    losses = []
    for command in commands:
        toolkit.ok(*command[1:], "--set", "train.steps=60", "--set", "train.validate_every=30")
        (run,) = (toolkit.runs / "train_image").iterdir()
        losses.append([record.loss for record in read_train_log(run / "metrics" / "train.jsonl")])
        last = read_validations(run / "metrics" / "validation.jsonl")[-1]
        assert last.samples == 359 and last.average
        assert last.means["accuracy"] > 0.8
        shutil.rmtree(run)
    # Tenths of a percent after 60 steps: the sums' last bits grow.
    assert losses[1][:5] == pytest.approx(losses[0][:5], rel=1e-4)
    assert losses[2][:5] == pytest.approx(losses[0][:5], rel=1e-4)
