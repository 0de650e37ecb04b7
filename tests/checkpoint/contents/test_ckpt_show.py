"""`toolkit ckpt show`: a tree that stays readable, pieces on request, and norms that name a damaged tensor."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from ckpt_runs import SHARD, flip, save, two_steps, typed

from toolkit.checkpoint.format.manifest_file import read_manifest


@pytest.fixture
def run(tmp_path) -> Path:
    return two_steps(tmp_path)


def shown(*words: object) -> str:
    done = typed("show", *words)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def layers(count: int) -> dict[str, torch.Tensor]:
    names = ("attention.weight", "norm.weight", "norm.bias")
    return {f"model.blocks.{number}.{name}": torch.ones(2, 3) for number in range(count) for name in names}


def test_the_newest_or_the_named_step_is_shown(run):
    text = shown(run)
    assert "step-00000020: step 20, 1 ranks" in text
    assert "model.a/[b]  bfloat16 [4, 3] 24 bytes  1 piece\n" in text
    assert "lr = 0.5" in text and "loss = 1.5" in text and "byte" not in text.replace("bytes", "")
    assert "[4, 3] at [0, 0] in shard-00000-of-00001.h5, byte " in shown(run, "--pieces")
    assert json.loads(shown(run / "checkpoints" / "step-00000010", "--json"))["step"] == 10
    assert json.loads(shown(run, "--step", 10, "--json"))["step"] == 10
    assert json.loads(shown(f"{run}:10", "--json"))["step"] == 10


def test_json_is_the_manifest(run):
    folder = run / "checkpoints" / "step-00000020"
    assert json.loads(shown(run, "--json")) == json.loads((folder / "manifest.json").read_text())


def test_layers_that_look_alike_stand_together(run):
    odd = layers(12) | {"model.blocks.7.norm.bias": torch.ones(3), "model.blocks.20.norm.bias": torch.ones(3)}
    save(run, 30, odd | {f"random.rank-{rank:05}.cpu": torch.ones(7) for rank in range(3)})
    lines = [line.strip(" │├└─") for line in shown(run).splitlines()]
    found = [line for line in lines if line.split("  ")[0] in ("[0-6]", "7", "[8-11]", "20.norm.bias")]
    assert found == [
        "[0-6]  3 tensors, 72 bytes each", "7  3 tensors, 60 bytes", "[8-11]  3 tensors, 72 bytes each",
        "20.norm.bias  float32 [3] 12 bytes  1 piece",
    ]  # fmt: skip
    assert "rank-[00000-00002].cpu  float32 [7] 28 bytes each  1 piece" in shown(run, "--only", "random")
    assert shown(run, "--norms", "--only", "random").count("float32 [7]") == 3


def test_hundreds_of_layers_take_a_few_lines(run):
    save(run, 30, layers(300))
    assert len(shown(run).splitlines()) < 15


def test_depth_and_patterns_choose(run):
    save(run, 30, layers(3) | {"optimizer.lr": torch.ones(1)})
    text = shown(run, "--depth", 1)
    assert "model.blocks  9 tensors, 216 bytes\n" in text and "norm" not in text
    text = shown(run, "--only", "*.bias", "--only", "optimizer")
    assert "bias" in text and "optimizer.lr" in text and "weight" not in text
    assert "tensors  4 tensors" in text


def test_norms_are_added_and_a_damaged_tensor_is_named(run):
    values = {"good": torch.tensor([3.0, -4.0, 0.0, math.nan, math.inf]), "torn": torch.ones(3 << 20)}
    folder = save(run, 30, values)
    text = shown(run, "--norms")
    assert "float32 [5] 20 bytes  1 piece  norm 5  largest 4  zeros 20 %  1 NaN  1 inf\n" in text
    flip(folder / SHARD, read_manifest(folder).tensors["torn"].pieces[0].byte_offset + (6 << 20))
    done = typed("show", run, "--norms")
    assert done.returncode == 1 and "norm 5" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "torn" in line]
    assert "DAMAGED" in line and SHARD in line and "block" in line
    done = typed("show", run, "--norms", "--json")
    norms = json.loads(done.stdout)["norms"]
    assert done.returncode == 1 and "block" in norms["torn"]["damaged"]
    assert norms["good"] == {"elements": 5, "norm": 5.0, "largest": 4.0, "zeros": 1, "nans": 1, "infinities": 1}


def test_names_that_would_harm_a_terminal_are_escaped(run):
    """A key may hold anything: terminal escapes, markup, lone surrogates, or nothing."""
    names = ["esc\x1b[2J", "[red]mark", "line\nend", "half\ud800", "", "."]
    save(run, 30, {name: torch.ones(1) for name in names}, {"state\x1b[2J": "\x1b]0;title\x07"})
    for words in ((), ("--pieces",), ("--norms",)):
        text = shown(run, *words)
        assert "\x1b" not in text and "\x07" not in text
        for name in (r"esc\x1b[2J", "[red]mark", r"line\nend", r"half\ud800", '""'):
            assert name in text


def test_keys_of_very_many_parts_end_somewhere(run):
    save(run, 30, {".".join("a" * count): torch.ones(1) for count in range(1, 3000, 7)})
    assert "tensors" in shown(run)
    assert typed("diff", run, run).returncode == 0
