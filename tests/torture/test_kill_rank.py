"""`kill -9` of a rank, again and again in one run: new ranks in the same allocation, the same losses in the end."""

from __future__ import annotations

import time

import pytest
from place import end_of, lines_of, longest_silence_s, losses, stepped, steps_lost, until
from process_table import processes_of

from toolkit.checkpoint.format.layout import committed_steps
from toolkit.rundir.layout import RunDirectory

STEPS_EACH_LIFE = 7  # more than the 5 steps between saves of paced_lm.toml, so that every life gets on
TWO_NODES = ("-N", "2", "--ntasks-per-node", "1")
PLACES = {"local": (), "slurm": TWO_NODES, "hydra": TWO_NODES, "openmpi": TWO_NODES}


def newest_save(run: RunDirectory) -> int:
    return max(committed_steps(run.checkpoints), default=0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("slurm", marks=pytest.mark.cluster),
        *(pytest.param(name, marks=pytest.mark.evidence) for name in ("local", "hydra", "openmpi")),
    ],
)
def test_kill_of_a_rank(launcher, request, repeats, undisturbed, ledger):
    place = request.getfixturevalue(launcher)
    steps = STEPS_EACH_LIFE * (repeats + 1)
    run = place.submit(*PLACES[launcher], steps=steps)
    seen, saved = [], 0
    for repeat in range(repeats):
        until(stepped(run, repeat, STEPS_EACH_LIFE))
        until(lambda before=saved: newest_save(run) > before)
        victim = repeat % 2
        role = "guard" if repeat % 5 == 4 else "rank"
        (process,) = processes_of(run, role, rank=victim)
        nodes = sorted(place.node_of(one) for one in processes_of(run, "rank"))
        saved, struck = newest_save(run), time.monotonic()
        process.kill()
        until(run.attempt(repeat).exit_file.exists, poll_s=0.02)
        noticed = time.monotonic() - struck
        until(stepped(run, repeat + 1), poll_s=0.02)
        resumed = next(line["step"] for line in lines_of(run) if line["attempt"] == repeat + 1)
        assert resumed > saved, "every complete save counts"
        seen.append((role, victim, nodes, {"noticed": noticed, "next step": time.monotonic() - struck}))
    state = place.wait(run)
    equal = losses(run) == {step: undisturbed[step] for step in range(1, steps + 1)}
    for repeat, (role, victim, nodes, seconds) in enumerate(seen):
        end = end_of(run, repeat)
        ledger.note(
            repeat, state=state, losses_equal=equal, seconds=seconds, killed=f"{role} {victim}", nodes=nodes, blamed=end["rank"],
            cause=end["cause"], next=end["next"], steps_lost=steps_lost(run), silent_s=longest_silence_s(run),
        )  # fmt: skip
    ends = [end_of(run, repeat) for repeat in range(repeats)]
    assert state == "completed" and equal
    assert {(end["cause"], end["next"]) for end in ends} == {("crashed", "restart")}
    blamed = [(end["rank"], victim) for end, (role, victim, _, _) in zip(ends, seen, strict=True) if role == "rank"]
    assert all(rank == victim for rank, victim in blamed)  # nobody can tell for a rank whose guard was killed
