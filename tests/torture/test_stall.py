"""Ranks that stop stepping, and ranks that die at the same step again."""

from __future__ import annotations

import signal
import time

import pytest
from place import attempts_of, end_of, longest_silence_s, losses, stepped, until
from process_table import processes_of

STALL_S = 12  # more than a start takes on two busy cores


@pytest.mark.evidence
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["local", "slurm"])
def test_a_stopped_rank_is_a_stall(way, request, repeats, undisturbed, ledger):
    """SIGSTOP of one rank: it is noticed, the ranks' stacks are kept, new ranks go on."""
    place = request.getfixturevalue(way)
    shape = ("-N", "2", "--ntasks-per-node", "1") if way == "slurm" else ()
    steps = 7 * (repeats + 1)
    run = place.submit(*shape, "--set", f"restart.stall_s={STALL_S}", steps=steps)
    seen = []
    for repeat in range(repeats):
        until(stepped(run, repeat, 7))
        (victim,) = processes_of(run, "rank", rank=repeat % 2)
        struck = time.monotonic()
        victim.kill(signal.SIGSTOP)
        until(run.attempt(repeat).exit_file.exists)
        noticed = time.monotonic() - struck
        until(stepped(run, repeat + 1))
        stacks = sorted(path.name for path in run.attempt(repeat).errors.glob("rank-*.stack"))
        seen.append((stacks, {"noticed": noticed, "next step": time.monotonic() - struck}))
    state = place.wait(run)
    equal = losses(run) == {step: undisturbed[step] for step in range(1, steps + 1)}
    for repeat, (stacks, seconds) in enumerate(seen):
        end = end_of(run, repeat)
        ledger.note(
            repeat, state=state, losses_equal=equal, seconds=seconds, cause=end["cause"], stacks=stacks,
            stopped_rank=repeat % 2, silent_s=longest_silence_s(run),
        )  # fmt: skip
    assert state == "completed" and equal
    assert {end_of(run, repeat)["cause"] for repeat in range(repeats)} == {"stalled"}
    for repeat, (stacks, seconds) in enumerate(seen):
        # A stopped process cannot say where it stands; the others can.
        assert any(f"{1 - repeat % 2}.stack" in name for name in stacks)
        assert seconds["noticed"] < STALL_S + 10


@pytest.mark.evidence
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["SIGKILL", "asleep"])
def test_the_same_failure_twice_without_a_step_ends_the_run(how, local, ledger):
    """Rank 1 fails in its third step, in every life, and nothing was saved before: `crashes = -1` does not help."""
    run = local.submit(
        *("--set", f"restart.stall_s={STALL_S}", "--set", "checkpoint.every_steps=0"),
        steps=10, MORTAL_RANK=1, STEPS_PER_LIFE=2, MORTAL_BY=how,
    )  # fmt: skip
    begin = time.monotonic()
    state = local.wait(run)
    ends = [end_of(run, attempt.number) for attempt in attempts_of(run)]
    ledger.note(
        0, state=state, losses_equal=None, seconds={"all": time.monotonic() - begin}, decision=ends[-1]["decision"],
        causes=[end["cause"] for end in ends], silent_s=longest_silence_s(run),
    )  # fmt: skip
    assert (state, len(ends)) == ("failed", 2)
    assert "twice without a new step" in ends[-1]["decision"]
