"""`toolkit ckpt`, as a user types it; and that none of it imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
import torch
from click.testing import CliRunner

from toolkit.checkpoint.checkpointer import Checkpointer
from toolkit.cli.ckpt import ckpt
from toolkit.world.facts import World

WITHOUT_TORCH = """
import sys
from toolkit.cli.main import cli
import toolkit.checkpoint
code = cli.main(sys.argv[1:], standalone_mode=False)
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


@pytest.fixture
def run(tmp_path) -> Path:
    world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
    checkpoints = Checkpointer(tmp_path / "run" / "checkpoints", world)
    for step in (10, 20):
        tensors = {"model": {"a/[b]": torch.ones(4, 3, dtype=torch.bfloat16)}, "lr": 0.5}
        checkpoints.save(step, tensors, {"loss": 1.5})
    return tmp_path / "run"


def invoke(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(ckpt, [str(word) for word in words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value or 0, result.stdout


def flip_last_bit_of_shard(folder: Path) -> None:
    shard = folder / "shard-00000-of-00001.h5"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("words", [["ls"], ["show"], ["index"], ["verify"], ["verify", "--full"]])
def test_no_command_imports_torch(run, words):
    command = [sys.executable, "-c", WITHOUT_TORCH, "ckpt", *words, str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ls_tells_committed_from_not(run):
    (run / "checkpoints" / "step-00000030.part-4").mkdir()
    (run / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    _, text = invoke("ls", run)
    lines = text.splitlines()[1:]
    assert "manifest.json: is missing" in lines[0]
    assert lines[1].split()[0] == "20" and lines[1].split()[-1] == "ok"
    assert "step-00000030.part-4" in lines[2] and "not committed: attempt 4" in lines[2]
    _, text = invoke("ls", run, "--json")
    answers = json.loads(text)
    assert [(answer["step"], answer["good"]) for answer in answers] == [(10, False), (20, True), (None, False)]
    assert answers[1]["world_size"] == 1 and answers[1]["size_bytes"] > 24


def test_a_run_is_found_by_its_name(run, tmp_path):
    runs = tmp_path / "runs" / "train"
    runs.mkdir(parents=True)
    run.rename(runs / "20260101-000000-abcd")
    (runs / "20260101-000000-abcd" / "record.json").write_text("{}")
    _, text = invoke("ls", "20260101-000000-abcd", "--runs", tmp_path / "runs")
    assert text.splitlines()[-1].split()[0] == "20"


def test_show_prints_the_newest_or_the_named_step(run):
    _, text = invoke("show", run)
    assert "step 20" in text
    assert "model.a/[b] bfloat16 [4, 3] 24 bytes" in text
    assert "[4, 3] at [0, 0] in shard-00000-of-00001.h5" in text
    assert "lr = 0.5" in text and "loss = 1.5" in text
    _, text = invoke("show", run / "checkpoints" / "step-00000010", "--json")
    assert json.loads(text)["step"] == 10
    assert json.loads(invoke("show", run, "--step", 10, "--json")[1])["step"] == 10


def test_index_is_made_anew(run):
    lost = run / "checkpoints" / "step-00000020" / "index.h5"
    lost.write_bytes(b"not an index")
    _, text = invoke("index", run)
    assert text == f"{lost}\n"
    with h5py.File(lost) as file:
        assert file["tensors/model.a%2F[b]"][:].tolist() == [[1.0] * 3] * 4


def test_verify_exits_1_and_names_file_block_and_tensor(run):
    assert invoke("verify", run)[0] == 0
    assert invoke("verify", "--full", run)[0] == 0
    flip_last_bit_of_shard(run / "checkpoints" / "step-00000010")
    # The quick look reads no data.
    assert invoke("verify", run)[0] == 0
    code, text = invoke("verify", "--full", run)
    assert code == 1
    assert "shard-00000-of-00001.h5 block 0" in text and "model.a/[b]" in text
    code, text = invoke("verify", "--full", run, "--json")
    (problem,) = json.loads(text)[0]["problems"]
    assert code == 1 and problem["block"] == 0 and problem["tensors"] == ["model.a/[b]"]
    assert json.loads(text)[1]["good"]


def test_verify_names_a_few_of_many_tensors_and_json_all(run):
    world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
    many = {f"w{number:02}": torch.ones(4) for number in range(48)}
    folder = Checkpointer(run / "checkpoints", world).save(30, many, {})
    flip_last_bit_of_shard(folder)
    _, text = invoke("verify", "--full", run, "--step", 30)
    assert "(holds w00, w01, w02 and 45 more)\n" in text
    _, text = invoke("verify", "--full", run, "--step", 30, "--json")
    assert json.loads(text)[0]["problems"][0]["tensors"] == sorted(many)


def test_ls_tells_what_a_resume_from_an_earlier_step_set_aside(run):
    (run / "checkpoints" / "step-00000020").rename(run / "checkpoints" / "step-00000020.aside-003")
    _, text = invoke("ls", run)
    assert text.splitlines()[2].endswith("set aside: start 3 was told to begin from an earlier one")


@pytest.mark.parametrize("words", [["ls", "{run}/nothing"], ["show", "{run}", "--step", "7"]])
def test_what_is_not_there_is_one_line_and_exit_code_4(run, words):
    program = "from toolkit.cli.main import main; main()"
    command = [sys.executable, "-c", program, "ckpt", *(word.format(run=run) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=run)
    assert done.returncode == 4
    assert done.stderr.startswith("toolkit: ") and done.stderr.count("\n") == 1 and "Fix:" in done.stderr
