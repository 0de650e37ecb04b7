"""Preemption for real: a job in `high` takes the nodes of a run in `low`, which goes on with the same losses."""

from __future__ import annotations

import time

import pytest
from place import attempts_of, end_of, longest_silence_s, losses, stepped, steps_lost, until

PREEMPTIONS_EACH_REPEAT = 2
NODES = ("-w", "node1,node2")
ENOUGH_STEPS = 500  # more than a life of two minutes takes


def preempt(place, run, attempt):
    """Take the run's nodes away after some steps; seconds until it had saved, and until its next step."""
    until(stepped(run, attempt, 7))
    struck = time.monotonic()
    taker = ["sbatch", "-p", "high", "-N2", *NODES, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"]
    assert place.command(*taker).returncode == 0
    until(run.attempt(attempt).exit_file.exists)
    saved = time.monotonic() - struck
    until(stepped(run, attempt + 1), timeout_s=120)
    return {"saved": saved, "next step": time.monotonic() - struck}


def submit_low(place, *options, steps, pace_s):
    shape = ("-p", "low", "-N2", "--ntasks-per-node", "1", *NODES, "--set", 'job.sbatch=["--exclusive"]')
    return place.submit(*shape, *options, steps=steps, pace_s=pace_s)


@pytest.mark.evidence
@pytest.mark.timeout(1500)
def test_preemptions_in_one_run(slurm, repeats, undisturbed, ledger):
    """No step is lost beyond the last boundary: each life goes on exactly after the step that was saved."""
    preemptions = PREEMPTIONS_EACH_REPEAT * repeats
    steps = 25 * (preemptions + 1)
    run = submit_low(slurm, steps=steps, pace_s=0.2)
    seconds = [preempt(slurm, run, attempt) for attempt in range(preemptions)]
    state = slurm.wait(run, timeout_s=300)
    equal = losses(run) == {step: undisturbed[step] for step in range(1, steps + 1)}
    for repeat, phases in enumerate(seconds):
        end = end_of(run, repeat)
        ledger.note(
            repeat, state=state, losses_equal=equal, seconds=phases, cause=end["cause"], next=end["next"],
            steps_lost=steps_lost(run), silent_s=longest_silence_s(run),
        )  # fmt: skip
    assert state == "completed" and equal
    assert steps_lost(run) == 0
    assert [end_of(run, number)["cause"] for number in range(preemptions)] == ["preempted"] * preemptions
    assert len(attempts_of(run)) == preemptions + 1


@pytest.mark.evidence
@pytest.mark.timeout(900)
def test_two_preemptions_and_a_walltime(slurm, undisturbed, ledger):
    run = submit_low(slurm, "-t", "2", "--set", "restart.warn_s=30", steps=ENOUGH_STEPS, pace_s=0.25)
    seconds = [preempt(slurm, run, attempt) for attempt in range(2)]
    begin = time.monotonic()
    until(run.attempt(2).exit_file.exists, timeout_s=180)
    at_walltime = time.monotonic() - begin
    until(stepped(run, 3), timeout_s=120)
    seconds.append({"until walltime's warning": at_walltime, "next step": time.monotonic() - begin - at_walltime})
    state = slurm.wait(run, timeout_s=300)
    equal = losses(run) == {step: undisturbed[step] for step in range(1, ENOUGH_STEPS + 1)}
    causes = [end_of(run, attempt.number)["cause"] for attempt in attempts_of(run)]
    ledger.note(
        0, state=state, losses_equal=equal, causes=causes, steps_lost=steps_lost(run), silent_s=longest_silence_s(run),
        seconds={f"{phase} {number}": value for number, one in enumerate(seconds) for phase, value in one.items()},
    )  # fmt: skip
    assert causes == ["preempted", "preempted", "walltime", "completed"]
    assert state == "completed" and equal and steps_lost(run) == 0
