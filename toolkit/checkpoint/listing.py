"""What stands in a `checkpoints` folder: committed checkpoints, and folders that are none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.layout import MANIFEST, aside_of, step_of
from toolkit.checkpoint.verify import verify_quickly
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


def checkpoint_folders(path: Path) -> list[Path]:
    """The checkpoints, committed or not, that a path means: itself, or those of a run or its `checkpoints`.

    Raises:
        NotFoundError: when there are none.
    """
    if step_of(path) is not None or aside_of(path) is not None or (path / MANIFEST).is_file():
        folders = [path] if path.is_dir() else []
    else:
        inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        folders = sorted(
            folder
            for folder in (inside.iterdir() if inside.is_dir() else [])
            if step_of(folder) is not None or aside_of(folder) is not None
        )
    if not folders:
        raise NotFoundError(
            "there is no checkpoint here", where=str(path), fix="name a run, its checkpoints folder or one step folder"
        )
    return folders


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
