"""50 restarts in a row on gloo: ours, and torchrun's own with a script of the same kind."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from place import attempts_of, end_of, lines_of, longest_silence_s, losses

RESTARTS_EACH_REPEAT = 5
TORCHRUN_S = 240  # some of its restarts hang until gloo's time-out
SCRIPT = Path(__file__).with_name("plain_ddp.py")


@pytest.mark.evidence
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_restarts_in_a_row(ranks, local, repeats, undisturbed, ledger):
    """Rank 1 kills itself after each new step; every one of the restarts must get to the next."""
    restarts = RESTARTS_EACH_REPEAT * repeats
    run = local.submit(
        "-n", ranks, "--set", "checkpoint.every_steps=1", steps=restarts + 1, pace_s=0, MORTAL_RANK=1, STEPS_PER_LIFE=1
    )  # fmt: skip
    state = local.wait(run, timeout_s=1100)
    ends = [end_of(run, attempt.number) for attempt in attempts_of(run)]
    between = _seconds_between_steps(run)
    equal = None if ranks != 2 else losses(run) == {step: undisturbed[step] for step in range(1, restarts + 2)}
    for restart, seconds in enumerate(between):
        ledger.note(
            restart, state=state, losses_equal=equal, seconds={"step to step": seconds}, silent_s=longest_silence_s(run)
        )
    assert state == "completed", ends[-1]
    assert [end["cause"] for end in ends] == ["crashed"] * restarts + ["completed"]
    assert {end["rank"] for end in ends[:-1]} == {1}
    assert len(lines_of(run)) == restarts + 1, "a step was taken twice, or not at all"
    assert equal is not False


def _seconds_between_steps(run):
    times = [datetime.fromisoformat(line["time"]).timestamp() for line in lines_of(run)]
    return [after - before for before, after in pairwise(times)]


@pytest.mark.evidence
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rendezvous", ["static", "standalone"])
def test_peer_torchrun_restarts(rendezvous, folder, repeats, ledger):
    """How many restarts torchrun brings to the next step here. It is measured, and not required."""
    restarts = RESTARTS_EACH_REPEAT * repeats
    here = folder / f"torchrun-{rendezvous}"
    here.mkdir()
    options = ["--standalone"] if rendezvous == "standalone" else []
    argv = [*options, "--nproc-per-node=2", f"--max-restarts={restarts}", str(SCRIPT), str(here), str(restarts + 1)]
    began = time.monotonic()
    with (here / "log.txt").open("w") as log:
        torchrun = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *argv], stdout=log, stderr=log)
        try:
            code = str(torchrun.wait(TORCHRUN_S))
        except subprocess.TimeoutExpired:
            code = f"none within {TORCHRUN_S} s"
            torchrun.terminate()  # it takes its ranks with it
            torchrun.wait(60)
    steps = [line.split() for line in (here / "steps.log").read_text().splitlines()]
    lives = {int(life) for _, life, _ in steps}
    times = [float(moment) for moment, _, _ in steps]
    between = [after - before for before, after in pairwise(times)]
    ledger.note(
        0, state=f"exit code {code}", losses_equal=None,
        seconds={"median step to step": median(between or [0]), "all": time.monotonic() - began},
        restarts_allowed=restarts, restarts_that_stepped=len(lives - {0}), last_step=int(steps[-1][2]),
        lives_that_failed=(here / "log.txt").read_text().count("failed (exitcode"),
    )  # fmt: skip
    assert 0 in lives  # the script itself works
