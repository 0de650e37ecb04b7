"""Checkpoints that are whole, and made without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.checkpoint.format.layout import step_folder
from toolkit.checkpoint.format.manifest import FileRecord, Manifest
from toolkit.checkpoint.format.manifest_file import manifest_text


def make_whole_checkpoint(
    directory: Path, step: int, *files: FileRecord, name: str = "", state: dict[str, Any] | None = None
) -> Path:
    """Make a checkpoint without tensors; of what is in `files`, only its manifest knows.

    Args:
        name: of the folder, in place of the step's.
        state: what the manifest keeps beside the tensors.
    """
    folder = directory / name if name else step_folder(directory, step)
    folder.mkdir(parents=True)
    manifest = Manifest(step, 0, 1, "2026-11-20T14:22:33Z", "by hand", state=state or {}, files=files)
    (folder / "manifest.json").write_text(manifest_text(manifest))
    return folder
