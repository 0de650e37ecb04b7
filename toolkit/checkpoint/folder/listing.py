"""What stands in a `checkpoints` folder: committed checkpoints, and folders that are none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.errors import host_cannot_read
from toolkit.checkpoint.folder.verify import verify_quickly
from toolkit.checkpoint.format.layout import MANIFEST, aside_of, step_of
from toolkit.errors import NotFoundError, ToolkitError

# What the words of `commit.set_aside` tell a reader.
_MEANING = {
    "part": "not committed: attempt {attempt} writes it, or was cut off",
    "bad": "found damaged by attempt {attempt}",
    "aside": "set aside: start {attempt} was told to begin from an earlier one",
    "left": "of a line that attempt {attempt} left",
    "stale": "not committed, of an attempt that was given up",
    "replaced": "replaced by attempt {attempt}",
    "removed": "being deleted by attempt {attempt}, or half deleted",
}
_TORCHS_OWN = ".metadata"  # the file by which torch.distributed.checkpoint knows its folders


@dataclass(frozen=True)
class Summary:
    """One folder. `step` is None where nothing loads it; the other numbers need a good manifest."""

    path: Path
    step: int | None
    status: str
    size_bytes: int | None = None
    files: int | None = None
    world_size: int | None = None
    saved_at: str | None = None

    @property
    def good(self) -> bool:
        """Committed, and whole as far as a quick look tells."""
        return self.status == "ok"


def is_checkpoint_folder(path: Path) -> bool:
    """True of one checkpoint's folder, committed or not, by its name or by its manifest."""
    named = step_of(path) is not None or aside_of(path) is not None
    return path.is_dir() and (named or (path / MANIFEST).exists())


def checkpoint_folders(path: Path) -> list[Path]:
    """The checkpoints, committed or not, that a path means: itself, or those of a run or its `checkpoints`.

    Those of one step stand beside each other, the oldest step first.

    Raises:
        NotFoundError: when there are none.
        OwnFailureError: this host may not read the folder, or cannot.
    """
    try:
        if is_checkpoint_folder(path):
            return [path]
        inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = [(place, folder) for folder in inside.iterdir() if (place := _place(folder)) is not None]
    except OSError as error:
        raise host_cannot_read(error, path) from None
    if not found:
        raise _no_checkpoint(path, inside)
    return [folder for _, folder in sorted(found)]


def _place(folder: Path) -> tuple[int, str] | None:
    """Where a folder stands in the list: names of nine digits sort before those of eight."""
    aside = aside_of(folder)
    step = step_of(folder) if aside is None else step_of(folder.with_name(aside[0]))
    return None if step is None else (step, folder.name)


def _no_checkpoint(path: Path, inside: Path) -> NotFoundError:
    if (path / _TORCHS_OWN).exists():
        return NotFoundError(
            "is a checkpoint of torch.distributed.checkpoint (DCP)",
            where=str(path),
            fix="`toolkit ckpt import` reads it",
        )
    if (path / "tasks").is_dir():
        fix = f"name a task of this array run: {path.name}_0, {path.name}_1, ..."
    elif inside != path:
        fix = "wait for the run to save one"
    else:
        fix = "name a run, its checkpoints folder or one step folder"
    return NotFoundError("there is no checkpoint here", where=str(path), fix=fix)


def summarise(folder: Path) -> Summary:
    """One folder at a glance; reads the manifest and looks at the files' sizes."""
    aside = aside_of(folder)
    if aside is not None:
        _, word, attempt = aside
        return Summary(folder, None, _MEANING.get(word, word).format(attempt=attempt))
    try:
        manifest, problems = verify_quickly(folder)
    except ToolkitError as error:
        return Summary(folder, step_of(folder), error.message)
    status = "; ".join(map(str, problems)) or "ok"
    if manifest is None:
        return Summary(folder, step_of(folder), status)
    return Summary(
        folder, manifest.step, status, manifest.size_bytes, len(manifest.files), manifest.world_size, manifest.saved_at
    )
