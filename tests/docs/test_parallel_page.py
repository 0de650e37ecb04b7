"""The commands and the example of docs/parallel.md, on every layout that its table of keys names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolkit.metrics.training import read_train_log

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
COMMANDS = [line.split("#")[0].split() for line in re.findall(r"^toolkit run .*$", PAGE, re.MULTILINE)]
LITTLE = ["--set", "train.steps=2", "--set", "args.width=32", "--set", "args.max_bytes=100000"]


@pytest.fixture
def folder(toolkit, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return toolkit.folder


def test_the_commands_train_and_a_run_goes_on_with_another_layout(toolkit, folder):
    assert len(COMMANDS) >= 3
    losses = []
    for command in COMMANDS:
        toolkit.ok(*command[1:], *LITTLE)
        newest = max((toolkit.runs / "train_lm").iterdir())
        losses.append([record.loss for record in read_train_log(newest / "metrics" / "train.jsonl")])
    assert all(one == pytest.approx(losses[0], rel=1e-3) for one in losses), "dropout alone differs"
    (resume,) = re.findall(r"`toolkit (resume last .*?)`", PAGE)
    said = toolkit(*resume.split(), "--set", "train.steps=3", "--wait")
    assert said.code == 0, said


def test_the_example_gives_the_same_losses_on_every_layout(toolkit, folder):
    ((name, body),) = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (folder / name).write_text(body, encoding="utf-8")
    (folder / "job.toml").write_text('[job]\nentry = "own_model.py:main"\n', encoding="utf-8")
    found = {}
    for layout in ("replicate=1", "replicate=2", "shard=2"):
        ranks = layout.partition("=")[2]
        said = toolkit("run", "job.toml", "-n", ranks, "--set", f"parallel.{layout}")
        assert said.code == 0, said
        found[layout] = re.findall(r"step \d: loss \S+", said.out + said.err)
    assert len(found["replicate=1"]) == 3
    assert found["replicate=2"] == found["shard=2"] == found["replicate=1"]
