"""kill -9 at any moment of saving: the next attempt loads exactly one committed state, the last that was promised or later.

The moments are system calls, found by recording a save that nobody disturbs, and random times.
"""

from __future__ import annotations

import random
import shutil
import signal
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from committed_states import Name, alone, json_of, load_name, tensors_of
from stories import STORIES, Story
from system_calls import Moment, chosen, moments
from torture_scale import cases
from torture_tally import Tally
from traced_ranks import RANKS_END_S, Ended, Fault, Tracing, require_strace, run_ranks, save_all

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.deletion import await_deletions
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.layout import committed_steps

SAMPLE_ON_2 = ("new steps in the background", "same step")


@dataclass
class Scene:
    """Fresh copies of what stands before attempt 1, and the ranks of that attempt."""

    folder: Path
    story: Story
    size: int

    def __post_init__(self) -> None:
        require_strace()
        self._numbers = count()
        self._before = self.folder / "before"
        (ended, *_) = run_ranks(
            self.folder / "first",
            save_all,
            (self._before, list(self.story.before), False, False, self.story.compression),
            size=self.size,
            attempt=0,
        )
        assert ended.code == 0, ended.stderr
        if self.story.leftover:
            shutil.copytree(self._before / f"step-{self.story.before[0]:08d}", self._before / "step-00000009.part-0-1")

    def attempt(self, *faults: Fault, kill_after_s: float | None = None) -> tuple[Path, list[Ended], list[Path]]:
        """One disturbed attempt: its checkpoints, how its ranks ended, and their system calls."""
        number = next(self._numbers)
        directory = self.folder / str(number) / "checkpoints"
        shutil.copytree(self._before, directory)
        tracing = Tracing(faults=faults) if kill_after_s is None else None
        arguments = (directory, list(self.story.steps), False, self.story.in_background, self.story.compression)
        ended = run_ranks(
            directory.parent / "ranks", save_all, arguments, size=self.size, tracing=tracing, kill_after_s=kill_after_s
        )
        return directory, ended, tracing.logs if tracing is not None else []

    def undisturbed(self) -> list[list[Moment]]:
        """The moments of each rank."""
        directory, ended, logs = self.attempt()
        assert all(rank.code == 0 for rank in ended), ended
        return [moments(log, directory) for log in logs]

    def resumed(self, directory: Path, ended: list[Ended]) -> Name:
        """What the next attempt loads, after all that is promised was looked at."""
        for folder in committed_steps(directory).values():
            assert not verify_fully(folder)[1], f"{folder.name} is committed and not whole"
        loaded = load_name(directory, list(range(self.size)), 2)
        returned = [tuple(said["returned"]) for rank in ended for said in rank.told if "returned" in said]
        least = max((self.story.loadable.index(name) for name in returned), default=0)
        assert loaded in self.story.loadable[least:], f"{loaded} was loaded, {returned} were saved"
        assert await_deletions(30)
        left = [path.name for path in directory.iterdir() if path.suffix not in ("", ".left-1")]
        assert not left, "what the dead attempt left was not removed"
        return loaded

    def goes_on(self, directory: Path) -> None:
        """The attempt after the kill saves, too."""
        Checkpointer(directory, alone(3)).save(7, tensors_of((7, 3), [0]), json_of((7, 3)))
        assert load_name(directory, [0], 4) == (7, 3)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("story", "size"),
    [
        pytest.param(story, size, marks=() if size == 1 or story in SAMPLE_ON_2 else pytest.mark.evidence)
        for story in STORIES
        for size in (1, 2)
        if STORIES[story].before
    ],
)
def test_killed_at_a_system_call(in_memory, story, size, tally: Tally):
    scene = Scene(in_memory, STORIES[story], size)
    of_ranks = scene.undisturbed()
    struck = 0
    for rank, of_rank in enumerate(of_ranks):
        most = [cases(50, 2), cases(25, 1), cases(10, 1)][rank if size == 1 else rank + 1]
        for moment in chosen(of_rank, most):
            directory, ended, _ = scene.attempt(Fault(moment.call, moment.number, "signal=KILL", rank))
            killed = ended[rank].code == -signal.SIGKILL
            loaded = scene.resumed(directory, ended)
            struck += killed
            if struck % 10 == 1:
                scene.goes_on(directory)
            outcome = "an earlier state" if loaded in scene.story.older else "the new state"
            tally.case(f"{story}, {size} rank{'s' * (size > 1)}", *["killed"] * killed, outcome)
            shutil.rmtree(directory.parent)
    assert struck, "no kill ever struck"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [1, 2])
def test_killed_at_a_random_time(in_memory, size, tally: Tally):
    scene = Scene(in_memory, STORIES["new steps"], size)
    _, undisturbed, _ = scene.attempt(kill_after_s=RANKS_END_S)
    seconds = max(rank.seconds for rank in undisturbed)
    choose = random.Random(size)
    for _ in range(cases(30, 2)):
        directory, ended, _ = scene.attempt(kill_after_s=choose.uniform(0, 0.9 * seconds))
        loaded = scene.resumed(directory, ended)
        outcome = "an earlier state" if loaded in scene.story.older else "the new state"
        tally.case(f"{size} rank{'s' * (size > 1)}", *["killed"] * (ended[0].code != 0), outcome)
        shutil.rmtree(directory.parent)
