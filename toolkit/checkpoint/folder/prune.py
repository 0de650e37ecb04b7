"""What may go from a `checkpoints` folder that nobody writes into: checkpoints beyond retention, and what was left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.folder.commit import set_aside
from toolkit.checkpoint.folder.deletion import discard
from toolkit.checkpoint.folder.listing import checkpoint_folders
from toolkit.checkpoint.folder.retention import Retention, surplus_folders
from toolkit.checkpoint.folder.verify import verify_fully, verify_quickly
from toolkit.checkpoint.format.layout import aside_of, step_of
from toolkit.errors import OwnFailureError, ToolkitError

_LEFT_BEHIND = {
    "stale": "a save that was given up",
    "removed": "half deleted",
    "replaced": "a newer save of the step has its place",
}
_UNFINISHED = {"part": "a save that was cut off"}
_SET_ASIDE = {
    "bad": "found damaged",
    "left": "of a line that the run left",
    "aside": "set aside by a resume from an earlier step",
}
# Their names are no checkpoints' any more, so nothing reads them while they are deleted.
_BEING_DELETED = ("stale", "removed", "replaced")


@dataclass(frozen=True)
class Removal:
    """One folder that goes, and why."""

    folder: Path
    why: str
    size_bytes: int


class Look:
    """Looks at the checkpoints that decide what stays, each once, and remembers what was wrong.

    Args:
        full: read every byte, and not names, sizes and manifests alone.
        before_reading: told each checkpoint before all of it is read.
    """

    def __init__(self, *, full: bool = False, before_reading: Callable[[Path], None] = lambda folder: None) -> None:
        self.full = full
        self._before_reading = before_reading
        self._wrong: dict[Path, str] = {}

    @property
    def damaged(self) -> dict[Path, str]:
        """What was looked at and counts for nothing, and why; of several problems the first."""
        return {folder: wrong for folder, wrong in self._wrong.items() if wrong}

    def is_whole(self, folder: Path) -> bool:
        """Whether nothing wrong is found.

        Raises:
            OwnFailureError: this host may not read it, or cannot.
        """
        if folder not in self._wrong:
            self._wrong[folder] = self._what_is_wrong(folder)
        return not self._wrong[folder]

    def _what_is_wrong(self, folder: Path) -> str:
        if self.full:
            self._before_reading(folder)
        try:
            _, problems = (verify_fully if self.full else verify_quickly)(folder)
        except OwnFailureError:
            raise
        except ToolkitError as error:  # of another version of the format, which nobody here can look into
            return error.message
        return str(problems[0]) if problems else ""


def removals(
    directory: Path,
    retention: Retention,
    source: Path | None = None,
    *,
    unfinished: bool,
    aside: bool,
    look: Look | None = None,
) -> list[Removal]:
    """What goes, the oldest step first; nothing is touched.

    Args:
        directory: a `checkpoints` folder.
        retention: which committed checkpoints stay.
        source: the one that its run was told to begin from; it stays, since the next attempt may need it.
        unfinished: also `.part-*`, which somebody may be writing.
        aside: also what was set aside for somebody to look at: `.bad-*`, `.left-*` and `.aside-*`.
        look: how it is found out which checkpoints are whole; quickly, if not given.

    Raises:
        NotFoundError: there is nothing in the folder.
        OwnFailureError: this host may not read the folder, or cannot.
    """
    words = _LEFT_BEHIND | (_UNFINISHED if unfinished else {}) | (_SET_ASIDE if aside else {})
    kept = source if source is not None and source.parent.resolve() == directory.resolve() else None
    step = step_of(kept) if kept is not None else None
    look = look or Look()
    surplus = set(surplus_folders(directory, retention, [] if step is None else [step], look.is_whole))
    found = []
    for folder in checkpoint_folders(directory):
        why = "more than are kept" if folder in surplus else _why_left_behind(folder, words, look)
        if why and (kept is None or folder.name != kept.name):
            found.append(Removal(folder, why, size_of(folder)))
    return found


def _why_left_behind(folder: Path, words: dict[str, str], look: Look) -> str:
    """Why a folder with a suffix goes; "" where it stays."""
    aside = aside_of(folder)
    if aside is None:
        return ""
    committed, word, _ = aside
    if word == "replaced" and not look.is_whole(folder.with_name(committed)):
        return ""  # the newer save never came: the next attempt gives it its name back
    return words.get(word, "")


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder; what goes away meanwhile counts nothing."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                yield Path(place, name).lstat().st_size
            except FileNotFoundError:
                continue


def remove(removal: Removal, attempt: int) -> bool:
    """Rename a folder, so that no checkpoint's name ever stands on half of it, and delete it.

    Args:
        removal: of `removals`.
        attempt: stands in the new name.

    Returns:
        False where a part of it is left; why was said on stderr.
    """
    aside = aside_of(removal.folder)
    folder = removal.folder
    if aside is None or aside[1] not in _BEING_DELETED:
        folder = set_aside(folder, "removed", attempt)
    discard(folder)
    return not folder.exists()
