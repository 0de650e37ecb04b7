"""A job that returns while its last save is still being written, and the process that ends with it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from sampling import sampled

from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.layout import committed_steps

JOB = """
import resource, time
import torch
from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.saving.prepared import PreparedSave

def main(world, config):
    write = PreparedSave._write_own
    def slowly(self, *given):
        time.sleep(1)
        return write(self, *given)
    PreparedSave._write_own = slowly
    tensors = {"weight": torch.ones(300, 300), "of": {str(world.rank): torch.ones(100, 100)}}
    checkpointer = Checkpointer(world.run_dir / "checkpoints", world)
    checkpointer.save(1, tensors, {})
    if config.args["fails"] and world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    checkpointer.save_in_background(2, tensors, {})
"""

SCRIPT = """
import resource, sys, time
from pathlib import Path
import torch
from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.saving.prepared import PreparedSave
from toolkit.world.facts import World

write = PreparedSave._write_own
def slowly(self, *given):
    time.sleep(1)
    return write(self, *given)
PreparedSave._write_own = slowly
checkpointer = Checkpointer(Path(sys.argv[1]), World(0, 0, 1, 1, 0, 1, "", "cpu", "none", "alone"))
tensors = {"weight": torch.ones(300, 300)}
checkpointer.save(1, tensors, {})
if sys.argv[2] == "fails":
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
checkpointer.save_in_background(2, tensors, {})
"""


@pytest.mark.parametrize("fails", sampled([False, True], lambda case: case[0]))
def test_a_rank_that_returns_waits_for_its_save(toolkit, fails):
    (toolkit.folder / "returns.py").write_text(JOB)
    job = toolkit.folder / "job.toml"
    job.write_text(
        f'[job]\nentry = "returns.py:main"\nranks_per_node = 2\n[args]\nfails = {json.dumps(fails)}\n[restart]\ncrashes = 0\n'
    )
    said = toolkit("submit", str(job), "--wait")
    run = toolkit.folder.glob("**/checkpoints")
    steps = {step: folder for path in run for step, folder in committed_steps(path).items()}
    if fails:
        assert said.code != 0 and list(steps) == [1]
        # Both ranks fail, and the supervisor ends the second one soon: on a busy machine before it logs the reason, too.
        log = toolkit.ok("logs", "--rank", "all")
        assert "checkpoint of step 2 was not saved: rank 1: File too large" in log and "Traceback" not in log
        assert "File too large" in json.loads(toolkit.ok("status", "last", "--json"))["reason"]
    else:
        assert said.code == 0, said
        assert list(steps) == [1, 2] and not verify_fully(steps[2])[1]


@pytest.mark.parametrize("what", sampled(["works", "fails"], lambda case: case[0] == "works"))
def test_a_process_that_ends_waits_for_its_save_and_tells_of_a_failure(tmp_path, what):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "checkpoints"), what],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    if what == "works":
        assert not verify_fully(committed_steps(tmp_path / "checkpoints")[2])[1]
        assert done.stderr == ""
    else:
        assert "toolkit: " in done.stderr and "checkpoint of step 2 was not saved" in done.stderr
        assert "Traceback" not in done.stderr
