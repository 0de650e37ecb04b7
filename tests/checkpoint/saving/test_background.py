"""Saves in the background on a disk that fills, and in a process that somebody interrupts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ckpt_runs import ALONE, disk_of_one_mib

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.errors import OwnFailureError

INTERRUPTED = """
import sys
from pathlib import Path

import torch
from toolkit.checkpoint import Checkpointer
from toolkit.world.facts import World

checkpoints = Checkpointer(Path(sys.argv[1]), World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=0))
weight = torch.zeros(400, 1000, 125)
for step in range(1, 1000):
    weight.fill_(step)
    checkpoints.save_in_background(step, {"w": weight}, {})
    weight.fill_(-1)
    print(step, flush=True)
"""


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_full_disk_leaves_the_last_good_one_and_is_said_once(tmp_path: Path, compression: str) -> None:
    torch.manual_seed(0)
    with disk_of_one_mib(tmp_path / "small") as folder:
        checkpoints = Checkpointer(folder / "checkpoints", ALONE, keep_last=1, compression=compression)
        small, large = torch.randn(50_000), torch.randn(400_000)
        checkpoints.save_in_background(1, {"w": small}, {})
        checkpoints.save_in_background(2, {"w": large}, {})
        with pytest.raises(OwnFailureError, match=r"step 2 was not saved: rank 0: No space left on device.*step 1 is"):
            checkpoints.wait()
        checkpoints.wait()
        checkpoints.save_in_background(3, {"w": small + 1}, {})
        checkpoints.wait()
        found = torch.zeros(50_000)
        loaded = Checkpointer(folder / "checkpoints", ALONE).load({"w": found})
        assert loaded is not None and loaded.step == 3 and torch.equal(found, small + 1)


def test_an_interrupt_ends_after_the_save_that_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), str(tmp_path / "checkpoints")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for step in iter(process.stdout.readline, "3\n"):
            assert step
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=240)
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    begun = max([3, *map(int, said.split())])
    newest, folder = max(committed_steps(tmp_path / "checkpoints").items())
    assert newest in (begun, begun + 1)  # the interrupt may come between a save's start and its line
    assert verify_fully(folder)[1] == []
    found = torch.zeros(400, 1000, 125)
    Checkpointer(tmp_path / "checkpoints", ALONE).load({"w": found})
    assert torch.equal(found, torch.full_like(found, newest))
