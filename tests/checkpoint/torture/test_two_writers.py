"""Two processes that save into one folder at once: one of them is refused, and no checkpoint has files of both.

The first is stopped at one of its system calls, the second lives its whole life, and the first goes on.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from committed_states import json_of, load_name, tensors_of
from system_calls import Moment, chosen, moment_of, moments
from torture_scale import cases
from torture_tally import Tally
from traced_ranks import Ended, Fault, GoOn, Tracing, require_strace, run_ranks, save_all

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.deletion import await_deletions
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.errors import ToolkitError
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.layout import RunDirectory
from toolkit.world.facts import World

GIVEN_UP = "attempt 0 was abandoned: attempt 1 owns the run now"


def new_run(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    for folder in (run.attempts, run.checkpoints):
        folder.mkdir(parents=True)
    assert claim_attempt(run).number == 0
    return run


def first_writer(run: RunDirectory, fault: Fault | None, meanwhile: Callable[[GoOn], None]) -> tuple[Ended, Path]:
    """Attempt 0 of a run saves steps 1 to 3. How it ended, and its system calls."""
    tracing = Tracing(faults=[fault] if fault else [])
    (ended,) = run_ranks(
        run.path / "ranks-0",
        save_all,
        (run.checkpoints, [1, 2, 3]),
        attempt=0,
        tracing=tracing,
        while_stopped=meanwhile if fault else None,
    )
    return ended, tracing.logs[0]


@pytest.mark.timeout(1800)
def test_the_attempt_before_saves_nothing_more(in_memory, tally: Tally):
    require_strace()
    run = new_run(in_memory / "undisturbed")
    ended, log = first_writer(run, None, lambda _: None)
    assert ended.code == 0, ended
    for number, moment in enumerate(chosen(moments(log, run.checkpoints), cases(60, 2))):
        run = new_run(in_memory / str(number))
        ended = overtaken(run, moment)
        returned = [tuple(said["returned"]) for said in ended.told if "returned" in said]
        if ended.code == 3:
            tally.case("an attempt and its successor", "the older refused")
        else:
            assert returned == [(1, 0), (2, 0), (3, 0)] and ended.code == 0, f"{moment}: {ended}"
            tally.case("an attempt and its successor", "the older had saved all before")
        assert all(not verify_fully(folder)[1] for folder in committed_steps(run.checkpoints).values()), moment
        assert load_name(run.checkpoints, [0], 2) == (7, 1)
        assert await_deletions(30)
        shutil.rmtree(run.path)


def overtaken(run: RunDirectory, moment: Moment) -> Ended:
    """How attempt 0 ended, which was stopped at a moment while attempt 1 was claimed and lived its whole life."""
    seconds: list[Ended] = []

    def second(_: GoOn) -> None:
        assert claim_attempt(run).number == 1
        assert load_name(run.checkpoints, [0], 1) in [None, (1, 0), (2, 0), (3, 0)]
        seconds.extend(run_ranks(run.path / "ranks-1", save_all, (run.checkpoints, [6, 7]), attempt=1))

    ended, _ = first_writer(run, Fault(moment.call, moment.number, "signal=STOP"), second)
    if not seconds:
        raise LookupError(f"{moment} was not reached")
    assert seconds[0].code == 0, seconds
    return ended


def test_the_attempt_before_hears_who_has_the_run(in_memory):
    require_strace()
    ended = overtaken(new_run(in_memory / "run"), Moment("fsync", 1))
    assert GIVEN_UP in ended.told[-1]["error"]


def save_as(world: World, tell: Callable[[Any], None], directory: Path, who: int, steps: list[int]) -> None:
    """Save as attempt 0 the states of `who`."""
    checkpoints = Checkpointer(directory, world, keep_last=2)
    for step in steps:
        checkpoints.save(step, tensors_of((step, who), [0]), json_of((step, who)))
        tell({"returned": (step, who)})
    assert await_deletions(30)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overlap", ["one inside the other", "crossed"])
def test_two_that_think_they_are_the_same_attempt(in_memory, overlap, tally: Tally):
    """Somebody starts the same script twice, outside of a run: both are attempt 0.

    The first is stopped, the second lives its whole life; or it is stopped, too, and the first lives to its end before.
    """
    require_strace()
    tracing = Tracing()
    alone = in_memory / "alone" / "checkpoints"
    run_ranks(in_memory / "alone" / "ranks", save_as, (alone, 1, [3, 4]), attempt=0, tracing=tracing)
    wrong = []
    for number, (moment, other) in enumerate(overlaps(tracing.logs[0], alone, crossed=overlap == "crossed")):
        ended = twins(in_memory / str(number), moment, other)
        problems = what_is_wrong(in_memory / str(number) / "checkpoints", ended)
        wrong += [f"{moment}, {other}: {problem}" for problem in problems]
        refused = "one refused" if 3 in {writer.code for writer in ended} else "none refused"
        tally.case(overlap, *["wrong"] * bool(problems), refused)
        shutil.rmtree(in_memory / str(number))
    assert not wrong, "\n".join(wrong)


def overlaps(log: Path, directory: Path, *, crossed: bool) -> list[tuple[Moment, Moment | None]]:
    """Where the first stops, and where the second does: in the middle of its data, at its commit, and anywhere."""
    data = moment_of(log, ("write", "pwritev2"), r"step-00000004\.part-0-\d+/shard-")
    committing = moment_of(log, ("fsync",), r"step-00000003\.part-0-\d+>")
    signing = moment_of(log, ("openat",), r"step-00000004\.part-0-\d+/\.manifest")
    everywhere = moments(log, directory)
    choose = random.Random(0)
    if crossed:
        anywhere = [(moment, choose.choice(everywhere)) for moment in chosen(everywhere, cases(58, 1))]
        return [(data, signing), *anywhere]
    return [(moment, None) for moment in (committing, *chosen(everywhere, cases(59, 1)))]


def twins(folder: Path, moment: Moment, other: Moment | None) -> list[Ended]:
    """Two attempts 0: the first stopped at `moment`, the second, where it is to be stopped, at `other`."""
    directory = folder / "checkpoints"
    ended: list[Ended] = []

    def second(first_goes_on: GoOn) -> None:
        faults = [Fault(other.call, other.number, "signal=STOP")] if other is not None else []
        ended.extend(
            run_ranks(
                folder / "second",
                save_as,
                (directory, 2, [3, 4]),
                attempt=0,
                tracing=Tracing(faults=faults),
                while_stopped=(lambda _: first_goes_on()) if other is not None else None,
            )
        )

    faults = [Fault(moment.call, moment.number, "signal=STOP")]
    ended += run_ranks(
        folder / "first",
        save_as,
        (directory, 1, [3, 4]),
        attempt=0,
        tracing=Tracing(faults=faults),
        while_stopped=second,
    )
    if len(ended) < 2:
        raise LookupError(f"{moment} was not reached")
    return ended


def what_is_wrong(directory: Path, ended: list[Ended]) -> list[str]:
    """What two writers of one attempt must not leave: files of both in one checkpoint, or less than they were told."""
    found = []
    for folder in committed_steps(directory).values():
        found += [f"{folder.name} is committed: {problem}" for problem in verify_fully(folder)[1]]
    for writer in ended:
        if writer.code not in (0, 3):
            found.append(f"a writer ended with {writer.code}: {writer.stderr.splitlines()[-1:]}")
    returned = [tuple(said["returned"]) for writer in ended for said in writer.told if "returned" in said]
    try:
        loaded = load_name(directory, [0], 1)
    except (AssertionError, ToolkitError) as error:
        return [*found, str(error)]
    if returned and (loaded not in returned or loaded[0] < max(returned)[0]):
        found.append(f"{loaded} was loaded, {returned} were saved")
    return found
