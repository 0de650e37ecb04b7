"""Lists a `checkpoints` folder: committed checkpoints, and folders whose suffix excludes them from loads."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.errors import host_cannot_read
from toolkit.checkpoint.folder.verify import verify_quickly
from toolkit.checkpoint.format.layout import MANIFEST, aside_of, step_of
from toolkit.errors import NotFoundError, ToolkitError

__all__ = ["Summary", "checkpoint_folders", "is_checkpoint_folder", "summarise"]

# What the suffixes that `commit.move_aside` and others append to folder names mean.
_MEANING = {
    "part": "not committed: attempt {attempt} is writing it, or was interrupted while writing",
    "bad": "found damaged by attempt {attempt}",
    "aside": "archived: start {attempt} resumed from an earlier checkpoint",
    "left": "belongs to a history that attempt {attempt} abandoned",
    "stale": "not committed, left by an abandoned attempt",
    "replaced": "replaced by attempt {attempt}",
    "removed": "being deleted by attempt {attempt}, or partly deleted",
}
_DCP_METADATA = ".metadata"  # the file that identifies a torch.distributed.checkpoint folder


@dataclass(frozen=True)
class Summary:
    """One checkpoint folder. `step` is None if loads ignore it; the counts are None if its manifest is unreadable."""

    path: Path
    step: int | None
    status: str
    size_bytes: int | None = None
    files: int | None = None
    world_size: int | None = None
    saved_at: str | None = None

    @property
    def good(self) -> bool:
        """Whether the checkpoint is committed and passes the quick check."""
        return self.status == "ok"


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether a path is the folder of one checkpoint, committed or not, according to its name or manifest."""
    has_name = step_of(path) is not None or aside_of(path) is not None
    return path.is_dir() and (has_name or (path / MANIFEST).exists())


def checkpoint_folders(path: Path) -> list[Path]:
    """Return the checkpoints at a path, sorted by step: the path itself, or those in a run or `checkpoints` folder.

    Raises NotFoundError if there are none, and OwnFailureError if this host cannot read the folder.
    """
    try:
        if is_checkpoint_folder(path):
            return [path]
        inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        keyed = [(key, folder) for folder in inside.iterdir() if (key := _sort_key(folder)) is not None]
    except OSError as error:
        raise host_cannot_read(error, path) from None
    if not keyed:
        raise _no_checkpoint(path, inside)
    return [folder for _, folder in sorted(keyed)]


def _sort_key(folder: Path) -> tuple[int, str] | None:
    """Return the step and name of a folder: names alone would sort a step of nine digits before one of eight."""
    aside = aside_of(folder)
    step = step_of(folder) if aside is None else step_of(folder.with_name(aside[0]))
    return None if step is None else (step, folder.name)


def _no_checkpoint(path: Path, inside: Path) -> NotFoundError:
    if (path / _DCP_METADATA).exists():
        return NotFoundError(
            "is a torch.distributed.checkpoint (DCP) folder, not a toolkit checkpoint",
            where=str(path),
            fix="convert it with `toolkit ckpt import`",
        )
    if (path / "tasks").is_dir():
        fix = f"pass a task of this array run: {path.name}_0, {path.name}_1, ..."
    elif inside != path:
        fix = "wait until the run has saved a checkpoint"
    else:
        fix = "pass a run, its checkpoints folder or one step folder"
    return NotFoundError("there is no checkpoint here", where=str(path), fix=fix)


def summarise(folder: Path) -> Summary:
    """Return the summary of one folder, from its manifest and its file sizes."""
    aside = aside_of(folder)
    if aside is not None:
        _, reason, attempt = aside
        return Summary(folder, None, _MEANING.get(reason, reason).format(attempt=attempt))
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
