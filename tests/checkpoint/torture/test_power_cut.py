"""The power goes at any moment of a save: what a file system may then hold loads as one committed state, never as a mix.

A save's system calls are recorded once. Then every disk that their fsyncs allow is laid out and loaded from; power_cut.py
says what they allow.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from committed_states import Name, load_name
from power_cut import WAYS, PowerCut
from recorded_changes import CALLS, OPTIONS, Change, Entered, Synced, Told, Tree, changes_of
from stories import STORIES, Story
from torture_scale import cases, spread
from torture_tally import Tally
from traced_ranks import Tracing, require_strace, run_ranks, save_all

from toolkit.checkpoint.folder.deletion import await_deletions
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.world.facts import World


def save_aloud(world: World, tell: Callable[[Any], None], directory: Path, steps: list[int], *how: Any) -> None:
    """As `save_all`, told on stderr, so that the telling stands among the recorded calls."""
    save_all(world, lambda said: os.write(2, json.dumps(said).encode()) and None, directory, steps, False, *how)


@dataclass
class Recording:
    """One attempt's changes below a folder, and what may be loaded after a power cut in it."""

    story: Story
    size: int
    cut: PowerCut
    folder: Path

    def least(self, done: int) -> int:
        """Which of the loadable states was promised when `done` changes were done."""
        told = [change.what for change in self.cut.changes[:done] if isinstance(change, Told)]
        names = [(int(said["returned"][0]), int(said["returned"][1])) for said in told if "returned" in said]
        return max((self.story.loadable.index(name) for name in names), default=0 if self.story.older else -1)

    def check(self, done: int, way: str, seed: int) -> Name | None:
        """Lay out one disk, and load from it.

        Raises:
            AssertionError: a promise was broken. ToolkitError: nothing loads.
        """
        disk = self.folder / f"{done}-{way}-{seed}".replace(" ", "-")
        self.cut.disk(done, way, random.Random(seed)).write_to(disk)
        directory = disk / "checkpoints"
        for folder in committed_steps(directory).values():
            problems = verify_fully(folder)[1]
            assert not problems, f"{folder.name} is committed and not whole: {problems[0]}"
        loaded = load_name(directory, list(range(self.size)), 2)
        least = self.least(done)
        assert loaded in (self.story.loadable[least:] if least >= 0 else [None, *self.story.loadable])
        assert await_deletions(30)
        assert not [path for path in directory.glob("step-*.*") if path.suffix != ".left-1"]
        shutil.rmtree(disk)
        return loaded

    def recycles(self) -> bool:
        """Whether a checkpoint that went became a part, so that its files were written over."""
        renamed = [change for change in self.cut.changes if isinstance(change, Entered) and change.leaves]
        return any(".part-" in change.name for change in renamed)

    def broken(self, disks: int) -> str | None:
        """The first thing found to go wrong, on some of the disks that are possible."""
        moments = spread(range(len(self.cut.changes) + 1), disks)
        for number, done in enumerate(random.Random(0).sample(moments, len(moments))):
            for way in WAYS:
                try:
                    self.check(done, way, number)
                except Exception as error:  # noqa: BLE001
                    return f"{done} done, {way}: {error}"
        return None

    def without(self, forgotten: Callable[[Synced], bool]) -> Recording:
        """The same attempt by a program that forgets some of its fsyncs."""
        changes: list[Change] = [c for c in self.cut.changes if not (isinstance(c, Synced) and forgotten(c))]
        assert len(changes) < len(self.cut.changes)
        return replace(self, cut=replace(self.cut, changes=changes))


def record(folder: Path, story: Story, size: int) -> Recording:
    """Record attempt 1 of a story below a folder that is there already, as a run's folder is."""
    require_strace()
    root = folder / "root"
    root.mkdir()
    if story.before:
        arguments = (root / "checkpoints", list(story.before), False, False, story.compression)
        (ended, *_) = run_ranks(folder / "first", save_all, arguments, size=size, attempt=0)
        assert ended.code == 0, ended
    before = Tree.of(root)
    tracing = Tracing(CALLS, OPTIONS)
    arguments = (root / "checkpoints", list(story.steps), story.in_background, story.compression)
    ended = run_ranks(folder / "ranks", save_aloud, arguments, size=size, tracing=tracing)
    assert all(rank.code == 0 for rank in ended), ended
    cut = PowerCut(before, changes_of(tracing.logs, root, before))
    # The record is complete: what it says of the end is what stands there, byte for byte.
    assert cut.disk(len(cut.changes), "all unsynced", random.Random(0)).contents() == Tree.of(root).contents()
    return Recording(story, size, cut, folder)


# It takes ten seconds of a core, whatever the scale.
SAMPLE = [("new steps", 2)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("story", "size"),
    [
        pytest.param(story, size, id=f"{story}, {size}", marks=[] if (story, size) in SAMPLE else pytest.mark.evidence)
        for story in STORIES
        for size in (1, 2)
    ],
)
def test_power_cut(in_memory, story, size, tally: Tally):
    recording = record(in_memory, STORIES[story], size)
    assert recording.recycles() == story.startswith("new steps")
    changes = len(recording.cut.changes)
    for number, done in enumerate(spread(range(changes + 1), cases(changes + 1, 5))):
        for way in WAYS:
            for seed in range(cases(2, 1) if way in ("any unsynced", "ordered names") else 1):
                loaded = recording.check(done, way, number * 10 + seed)
                outcome = (
                    "the new state" if loaded in recording.story.loadable[len(recording.story.older) :] else "earlier"
                )
                tally.case(f"{story}, {size} rank{'s' * (size > 1)}", outcome)


# What a save must not forget: each is found by the replays, so that they would find it in a real one.
FORGOTTEN = {
    "bytes of the shard files": lambda synced: Path(synced.path).name.startswith("shard-"),
    "bytes of the manifest": lambda synced: "manifest" in Path(synced.path).name,
    "names in the new folder": lambda synced: ".part-" in Path(synced.path).name,
    "the new folder's own name": lambda synced: Path(synced.path).name == "checkpoints",
}


@pytest.mark.parametrize(
    ("story", "names"),
    [
        pytest.param("new steps", list(FORGOTTEN), id="new steps"),
        pytest.param("new steps, compressed", list(FORGOTTEN)[:1], id="compressed", marks=pytest.mark.evidence),
    ],
)
def test_a_forgotten_fsync_is_found(in_memory, story, names, tally: Tally):
    recording = record(in_memory, STORIES[story], 1)
    assert recording.broken(cases(60, 4)) is None
    for name in names:
        assert recording.without(FORGOTTEN[name]).broken(60), name
        tally.case(f"{story}, without: {name}", "found")
