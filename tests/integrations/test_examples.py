"""The example of each framework as a user runs it: stopped, resumed, and continued on another number of ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.metrics.window_file import read_windows
from toolkit.rundir.layout import RunDirectory

ROOT = Path(__file__).parents[2]
GUEST = pytest.mark.evidence
STEPS = 300  # more than a run with pauses makes before it is stopped


class Commands:
    """Calls `toolkit` with the Python that has the framework."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = str(python)
        self._folder = folder

    def __call__(self, *words: object, code: int = 0) -> str:
        command = [self.python, "-c", "from toolkit.cli.main import main; main()", *map(str, words)]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def submit(self, job: str, *words: object) -> RunDirectory:
        printed = self("submit", job, "-n", 2, "--parsable", *words)
        (run_id,) = re.findall(r"^local-\d+;(\S+)$", printed, re.M)
        (path,) = (self._folder / "runs").glob(f"*/{run_id}")
        return RunDirectory(path)


@pytest.fixture
def commands(toolkit, request):
    """In a folder of the test's own, on this machine."""
    python = Path(sys.executable)
    if request.node.get_closest_marker("evidence"):
        subprocess.run([sys.executable, "scripts/guests.py"], cwd=ROOT, check=True)
        python = ROOT / ".venv-guests/bin/python"
    toolkit.patch.setenv("OMP_NUM_THREADS", "1")
    return Commands(python, toolkit.folder)


def losses(run: RunDirectory) -> dict[int, float]:
    """The loss of each step, as rank 0 prints it, or as the Trainer stores it."""
    found = {}
    for log in sorted(run.path.glob("attempts/*/logs/rank-0.log")):
        found |= {
            int(number): float(loss) for number, loss in re.findall(r"^step (\d+): loss (\S+)", log.read_text(), re.M)
        }
    for state in run.path.glob("checkpoints/checkpoint-*/trainer_state.json"):
        found |= {one["step"]: one["loss"] for one in json.loads(state.read_text())["log_history"] if "loss" in one}
    return found


def step_of(run: RunDirectory, attempt: int = 0) -> int:
    beat = run.attempt(attempt).heartbeat
    return json.loads(beat.read_text())["step"] if beat.exists() else 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("job", "other_ranks"),
    [
        ("hf_trainer", 1),
        ("accelerate_loop", 1),
        pytest.param("lightning_fit", 1, marks=GUEST),
        pytest.param("deepspeed_zero2", 0, marks=GUEST),
    ],
)
def test_a_stopped_run_continues_as_if_it_had_not_been_stopped(commands, wait_until, job, other_ranks) -> None:
    arguments = ("--", "--steps", STEPS, "--save-every", 10_000, "--pause")
    whole = commands.submit(job, *arguments, 0)
    commands("wait", whole.run_id)
    run = commands.submit(job, *arguments, 0.5)
    wait_until(lambda: step_of(run) >= 3)
    commands("save", run.run_id)
    wait_until(lambda: any(run.checkpoints.glob("*")))
    commands("stop", run.run_id)
    commands("wait", run.run_id, code=130)
    stopped_at = step_of(run)
    log = (run.attempt(0).path / "logs/rank-0.log").read_text()
    assert f"saved at step {stopped_at} in" in log and "steps are done" not in log  # what follows the training
    assert any(str(stopped_at) in path.name for path in run.checkpoints.glob("*"))
    assert {path.read_text() for path in run.attempt(0).ranks.glob("*.done")} == {"stopped\n"}
    commands("resume", run.run_id, "--wait", *arguments, 0)
    assert min(step_of_lines(run, attempt=1), default=stopped_at + 1) == stopped_at + 1
    expected, found = losses(whole), losses(run)
    assert len(expected) == STEPS and found.keys() == expected.keys()
    assert max(abs(found[number] - expected[number]) for number in expected) < 1e-6
    windows = read_windows(run.attempt(1).path / "windows" / "rank-00000.bin")
    assert all({"step_s", "loss"} <= window.metrics.keys() for window in windows if window.rank == 0)
    if other_ranks:
        commands("resume", run.run_id, "-n", other_ranks, "--wait", "--", "--steps", STEPS + 2)
        assert losses(run).keys() == {*range(1, STEPS + 3)} and step_of(run, 2) == STEPS + 2
    else:
        answer = commands("resume", run.run_id, "-n", 1, "--wait", "--", "--steps", STEPS + 2, code=2)
        command, *_of_other_lines = re.findall(r"python (-m deepspeed.checkpoint.ds_to_universal .*)", answer)
        subprocess.run([commands.python, *command.split()], check=True)
        commands("resume", run.run_id, "-n", 1, "--wait", "--", "--steps", STEPS + 2)
        assert losses(run).keys() == {*range(1, STEPS + 3)}


def step_of_lines(run: RunDirectory, attempt: int) -> list[int]:
    log = (run.attempt(attempt).path / "logs/rank-0.log").read_text()
    return [int(number) for number in re.findall(r"^step (\d+): loss", log, re.M)]
