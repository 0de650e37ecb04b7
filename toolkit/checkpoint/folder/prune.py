"""Selects and removes surplus checkpoints and leftovers in a `checkpoints` folder to which no process writes."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.folder.commit import move_aside
from toolkit.checkpoint.folder.deletion import discard
from toolkit.checkpoint.folder.listing import checkpoint_folders
from toolkit.checkpoint.folder.retention import Retention, surplus_folders
from toolkit.checkpoint.folder.verify import verify_fully, verify_quickly
from toolkit.checkpoint.format.layout import aside_of, step_of
from toolkit.errors import OwnFailureError, ToolkitError

__all__ = ["CompletenessCheck", "Removal", "removals", "remove"]

_LEFTOVERS = {
    "stale": "an abandoned save",
    "removed": "partly deleted",
    "replaced": "replaced by a newer save of the step",
}
_UNFINISHED = {"part": "an interrupted save"}
_ARCHIVED = {
    "bad": "found damaged",
    "left": "belongs to a history that the run abandoned",
    "aside": "archived by a resume from an earlier step",
}
# No process reads folders with these suffixes, so they need no rename before the deletion.
_BEING_DELETED = ("stale", "removed", "replaced")


@dataclass(frozen=True)
class Removal:
    """A folder to remove, the reason, and its size."""

    folder: Path
    why: str
    size_bytes: int


class CompletenessCheck:
    """Checks whether checkpoints are complete, each only once, and remembers their problems.

    With `full` it reads every byte of a checkpoint, after calling `before_reading` with its folder.
    """

    def __init__(self, *, full: bool = False, before_reading: Callable[[Path], None] = lambda folder: None) -> None:
        self.full = full
        self._before_reading = before_reading
        self._problems: dict[Path, str] = {}

    @property
    def damaged(self) -> dict[Path, str]:
        """The checkpoints that failed the check, each with its first problem."""
        return {folder: problem for folder, problem in self._problems.items() if problem}

    def is_whole(self, folder: Path) -> bool:
        """Return whether the checkpoint passes the check. Raises OwnFailureError if this host cannot read it."""
        if folder not in self._problems:
            self._problems[folder] = self._first_problem(folder)
        return not self._problems[folder]

    def _first_problem(self, folder: Path) -> str:
        if self.full:
            self._before_reading(folder)
        try:
            _, problems = (verify_fully if self.full else verify_quickly)(folder)
        except OwnFailureError:
            raise
        except ToolkitError as error:  # this version of toolkit cannot check another format version
            return error.message
        return str(problems[0]) if problems else ""


def removals(
    directory: Path,
    retention: Retention,
    source: Path | None = None,
    *,
    unfinished: bool,
    aside: bool,
    check: CompletenessCheck | None = None,
) -> list[Removal]:
    """Return the folders to remove, lowest step first. Removes nothing itself.

    Args:
        directory: a `checkpoints` folder.
        source: the checkpoint from which the user resumed the run; kept, because the next attempt may need it.
        unfinished: include `.part-*` folders, which a process may be writing.
        aside: include folders that were archived for inspection: `.bad-*`, `.left-*` and `.aside-*`.
        check: decides which checkpoints are complete; by default the quick check.

    Raises NotFoundError if there are no checkpoints, and OwnFailureError if this host cannot read the folder.
    """
    reasons = _LEFTOVERS | (_UNFINISHED if unfinished else {}) | (_ARCHIVED if aside else {})
    kept = source if source is not None and source.parent.resolve() == directory.resolve() else None
    step = step_of(kept) if kept is not None else None
    check = check or CompletenessCheck()
    surplus = set(surplus_folders(directory, retention, [] if step is None else [step], check.is_whole))
    selected = []
    for folder in checkpoint_folders(directory):
        why = "beyond retention" if folder in surplus else _why_leftover(folder, reasons, check)
        if why and (kept is None or folder.name != kept.name):
            selected.append(Removal(folder, why, size_of(folder)))
    return selected


def _why_leftover(folder: Path, reasons: dict[str, str], check: CompletenessCheck) -> str:
    """Return the reason to remove a folder with a suffix; "" to keep it."""
    aside = aside_of(folder)
    if aside is None:
        return ""
    committed, reason, _ = aside
    if reason == "replaced" and not check.is_whole(folder.with_name(committed)):
        return ""  # the newer save did not finish, so the next attempt restores the name of this folder
    return reasons.get(reason, "")


def size_of(folder: Path) -> int:
    """Return the total size of the files in a folder in bytes, ignoring files that vanish meanwhile."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                yield Path(parent, name).lstat().st_size
            except FileNotFoundError:
                continue


def remove(removal: Removal, attempt: int) -> bool:
    """Rename a folder, so that it does not look committed while it is deleted, and delete it; False if files remain."""
    aside = aside_of(removal.folder)
    folder = removal.folder
    if aside is None or aside[1] not in _BEING_DELETED:
        folder = move_aside(folder, "removed", attempt)
    discard(folder)
    return not folder.exists()
