"""Lists a `checkpoints` folder: committed checkpoints, and folders with a suffix, which are not loaded."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.errors import host_cannot_read
from toolkit.checkpoint.folder.verify import verify_quickly
from toolkit.checkpoint.format.layout import MANIFEST, aside_of, step_of
from toolkit.errors import NotFoundError, ToolkitError

__all__ = ["Summary", "checkpoint_folders", "is_checkpoint_folder", "summarise"]

# The meanings of the suffixes of `commit.move_aside`.
_MEANING = {
    "part": "not committed: attempt {attempt} is writing it, or was interrupted",
    "bad": "found damaged by attempt {attempt}",
    "aside": "archived: start {attempt} resumed from an earlier one",
    "left": "of a history that attempt {attempt} abandoned",
    "stale": "not committed, of an abandoned attempt",
    "replaced": "replaced by attempt {attempt}",
    "removed": "being deleted by attempt {attempt}, or partly deleted",
}
_DCP_METADATA = ".metadata"  # the file that marks a folder of torch.distributed.checkpoint


@dataclass(frozen=True)
class Summary:
    """One folder. `step` is None if nothing loads it; the other numbers need a good manifest."""

    path: Path
    step: int | None
    status: str
    size_bytes: int | None = None
    files: int | None = None
    world_size: int | None = None
    saved_at: str | None = None

    @property
    def good(self) -> bool:
        """Committed, and passes the quick check."""
        return self.status == "ok"


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a path is one checkpoint's folder, committed or not, by its name or by its manifest."""
    has_name = step_of(path) is not None or aside_of(path) is not None
    return path.is_dir() and (has_name or (path / MANIFEST).exists())


def checkpoint_folders(path: Path) -> list[Path]:
    """The checkpoints of a path, by step: itself, or those of a run or its `checkpoints` folder, committed or not.

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
    """The step and name of a folder: by name alone, nine digits would sort before eight."""
    aside = aside_of(folder)
    step = step_of(folder) if aside is None else step_of(folder.with_name(aside[0]))
    return None if step is None else (step, folder.name)


def _no_checkpoint(path: Path, inside: Path) -> NotFoundError:
    if (path / _DCP_METADATA).exists():
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
    """The summary of one folder, from the manifest and the files' sizes."""
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
