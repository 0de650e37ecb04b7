"""Decides whether a load may use a checkpoint, and suggests others if it may not."""

from pathlib import Path

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.folder.verify import verify_quickly
from toolkit.checkpoint.format.layout import aside_of, committed_steps, step_of
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.errors import NotFoundError, ToolkitError

__all__ = ["good_manifest"]


def good_manifest(source: Path) -> Manifest:
    """Return the manifest. Raises NotFoundError or CorruptCheckpointError if the folder fails the quick check."""
    if not source.is_dir():
        raise NotFoundError("expected a checkpoint folder", where=str(source), fix="pass a step-… folder")
    if step_of_any(source) is None and (inside := committed_steps(source)):
        newest = inside[max(inside)]
        message = "expected a checkpoint, got a folder that contains checkpoints"
        raise NotFoundError(message, where=str(source), fix=f"pass one of these, such as {newest}")
    manifest, problems = verify_quickly(source)
    if manifest is None or problems:
        raise CorruptCheckpointError("; ".join(map(str, problems)))
    return manifest


def others_beside(source: Path) -> str:
    """Return the fix for a damaged `source`, which names the checkpoints in its folder that pass the quick check."""
    whole = [
        folder.name
        for folder in sorted(source.parent.iterdir() if source.parent.is_dir() else [])
        if folder.name != source.name and step_of_any(folder) is not None and _looks_whole(folder)
    ]
    if not whole:
        return "start from a checkpoint of another run; no other checkpoint in this folder is complete"
    return f"`toolkit resume RUN --from CHECKPOINT` with one that passes the quick check: {', '.join(whole)}"


def step_of_any(folder: Path) -> int | None:
    """Return the step of a committed checkpoint, including one that a resume from an earlier step has archived."""
    aside = aside_of(folder)
    if aside is not None and aside[1] == "aside":
        return step_of(folder.with_name(aside[0]))
    return step_of(folder)


def _looks_whole(folder: Path) -> bool:
    try:
        return not verify_quickly(folder)[1]
    except ToolkitError:  # the checkpoint has another format version
        return False
