"""`kill -9` of everything in the middle of a save: the last committed checkpoint is whole, no half one is taken."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from place import TOOLKIT, longest_silence_s, losses, settings_of, stepped, steps_lost, until
from process_table import processes_of

# Some 60 MB a checkpoint, so that a save lasts long enough to be hit.
LARGE = ("--set", "args.width=384", "--set", "args.layers=3", "--set", "checkpoint.every_steps=2")
STEPS_EACH_LIFE = 4
MOST_TRIES = 4


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_kill_of_everything_in_a_save(local, slurm, repeats, ledger):
    """Supervisor, srun, guards and ranks at once, at a random moment of a save, then a resume."""
    steps = STEPS_EACH_LIFE * (MOST_TRIES * repeats + 1)
    whole = local.submit(*LARGE, "--set", "checkpoint.every_steps=0", steps=steps, pace_s=0)
    assert local.wait(whole, timeout_s=300) == "completed"
    run = slurm.submit("-N", "2", "--ntasks-per-node", "1", *LARGE, steps=steps)
    moments, seen, attempt = random.Random(1), [], 0
    while len(seen) < repeats and attempt < MOST_TRIES * repeats:
        until(stepped(run, attempt, 3))  # so that one save of this life was committed
        victims = processes_of(run)  # before, since looking for them takes as long as a save
        until(lambda: list(run.checkpoints.glob("*.part-*")), poll_s=0.002)
        time.sleep(moments.uniform(0, 0.03))
        for process in victims:  # at once: the search for others may last longer than the save
            process.kill()
        for process in processes_of(run):
            process.kill()
        gone = until(lambda: not processes_of(run))
        parts = [path.name for path in run.checkpoints.glob(f"*.part-{attempt}-*")]
        verified, bad = verify(slurm, run)
        until(lambda: slurm.status(run)["state"] in ("lost", "failed"), poll_s=0.5)
        begin = time.monotonic()
        slurm.resume(run, *settings_of(steps))
        attempt += 1
        until(run.attempt(attempt).heartbeat.exists)
        if parts:  # else the save was over before the kill
            seen.append((parts, verified, bad, {"all gone": gone, "resumed": time.monotonic() - begin}))
    state = slurm.wait(run, timeout_s=300)
    equal = losses(run) == losses(whole)
    for repeat, (parts, verified, bad, seconds) in enumerate(seen):
        ledger.note(
            repeat, state=state, losses_equal=equal, seconds=seconds, half_saves=parts, whole=verified, damaged=bad,
            steps_lost=steps_lost(run), silent_s=longest_silence_s(run),
        )  # fmt: skip
    assert state == "completed" and equal
    assert len(seen) == repeats, "no kill hit a save"
    assert all(whole and not bad for _, whole, bad, _ in seen)
    left = [path.name for path in Path(run.checkpoints).glob("step-*") if "." in path.name]
    assert not left, "half saves were left behind"


def verify(place, run) -> tuple[int, list[str]]:
    """How many committed checkpoints are whole, every byte read, and what is wrong with others."""
    said = json.loads(place.command(TOOLKIT, "ckpt", "verify", run.run_id, "--full", "--json").stdout)
    return sum(one["good"] for one in said), [problem for one in said for problem in one["problems"]]
