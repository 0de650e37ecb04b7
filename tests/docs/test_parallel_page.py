"""The commands and the example of docs/parallel.md, on every layout that its table of keys names."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
from launch import launch, said_by
from sampling import sampled

from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.shipped import shipped_jobs
from toolkit.metrics.training import read_train_log

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
COMMANDS = [line.split("#")[0].split() for line in re.findall(r"^toolkit run train_lm .*$", PAGE, re.MULTILINE)]
LITTLE = [
    "--set",
    "train.steps=2",
    "--set",
    "args.layers=2",
    "--set",
    "args.width=32",
    "--set",
    "args.max_bytes=100000",
    "--set",
    "args.context=128",
]


@pytest.fixture
def folder(toolkit, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return toolkit.folder


def config_of(command: list[str]):
    """The job as the command asks for it, at a little size."""
    words = [*command[3:], *LITTLE]  # behind "toolkit run train_lm"
    ranks = Flag(int(words[words.index("-n") + 1]), "test")
    settings = [after for word, after in pairwise(words) if word == "--set"]
    job = shipped_jobs()["train_lm"]
    return resolve_job(job, site=None, environ={}, flags={"job.ranks_per_node": ranks}, settings=settings)


def train(world, config) -> None:
    from toolkit.jobs import train_lm

    train_lm.main(world, config)


@pytest.mark.parametrize("commands", sampled([COMMANDS[:2], COMMANDS], lambda case: case[0] is not COMMANDS), ids=len)
def test_the_commands_train_alike(tmp_path, commands):
    """By forked ranks: a command of its own for each costs the imports of all its ranks."""
    assert len(COMMANDS) == 8
    losses = []
    for number, command in enumerate(commands):
        config, run_dir = config_of(command), tmp_path / str(number)
        launch(train, config.job.ranks_per_node, run_dir, config, timeout_s=200)
        losses.append([record.loss for record in read_train_log(run_dir / "metrics" / "train.jsonl")])
    assert all(one == pytest.approx(losses[0], rel=1e-3) for one in losses), "dropout alone differs"


@pytest.mark.evidence  # tests/parallel/test_parity.py has a sample without the command line
@pytest.mark.timeout(300)
def test_a_run_goes_on_with_another_layout(toolkit, folder):
    """On two ranks, which start in half the time of the page's four."""
    toolkit.ok(*COMMANDS[4][1:], *LITTLE, "-n", 2, "--set", "parallel.tp=1")
    (resume,) = re.findall(r"`toolkit (resume last .*?)`", PAGE)
    assert resume.endswith("--set parallel.shard=1")
    said = toolkit(*resume.split(), "--set", "parallel.pp=1", "--set", "train.steps=3", "--wait")
    assert said.code == 0, said


def train_own(world, file: str, config) -> None:
    runpy.run_path(file)["main"](world, config)


def test_the_example_gives_the_same_losses_on_every_layout(tmp_path):
    ((name, body),) = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / name).write_text(body, encoding="utf-8")
    (tmp_path / "job.toml").write_text('[job]\nentry = "own_model.py:main"\n', encoding="utf-8")
    found = {}
    for layout in ("replicate=1", "replicate=2", "shard=2"):
        flags = {"job.ranks_per_node": Flag(int(layout[-1]), "test")}
        settings = [f"parallel.{layout}"]
        config = resolve_job(tmp_path / "job.toml", site=None, environ={}, flags=flags, settings=settings)
        launch(train_own, config.job.ranks_per_node, tmp_path / layout, str(tmp_path / name), config)
        found[layout] = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", said_by(tmp_path / layout, 0))]
    assert len(found["replicate=1"]) == 3
    # Sums of two halves are rounded otherwise than one sum, and the loss is printed to a ten-thousandth.
    for layout in ("replicate=2", "shard=2"):
        assert found[layout] == pytest.approx(found["replicate=1"], rel=1e-5, abs=2e-4)
