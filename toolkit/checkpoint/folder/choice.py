"""Whether a load may use a checkpoint, and the error if it may not."""

from pathlib import Path

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.folder.verify import verify_quickly
from toolkit.checkpoint.format.layout import aside_of, committed_steps, step_of
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.errors import NotFoundError, ToolkitError

__all__ = ["good_manifest"]


def good_manifest(source: Path) -> Manifest:
    """The manifest of a checkpoint that passes the quick check; NotFoundError or CorruptCheckpointError otherwise."""
    if not source.is_dir():
        raise NotFoundError("is not a checkpoint folder", where=str(source), fix="name a step-… folder")
    if step_of_any(source) is None and (inside := committed_steps(source)):
        newest = inside[max(inside)]
        message = "expected a checkpoint, got a folder that contains checkpoints"
        raise NotFoundError(message, where=str(source), fix=f"name one of them, as {newest}")
    manifest, problems = verify_quickly(source)
    if manifest is None or problems:
        raise CorruptCheckpointError("; ".join(map(str, problems)))
    return manifest


def others_beside(source: Path) -> str:
    """The fix for a damaged `source`: names the checkpoints beside it that pass the quick check, also archived ones."""
    whole = [
        folder.name
        for folder in sorted(source.parent.iterdir() if source.parent.is_dir() else [])
        if folder.name != source.name and step_of_any(folder) is not None and _looks_whole(folder)
    ]
    if not whole:
        return "start from another run's checkpoint; no other checkpoint of it is complete"
    return f"`toolkit resume RUN --from` one that passes the quick check: {', '.join(whole)}"


def step_of_any(folder: Path) -> int | None:
    """The step of a committed checkpoint, also of one that a resume from an earlier step archived."""
    aside = aside_of(folder)
    if aside is not None and aside[1] == "aside":
        return step_of(folder.with_name(aside[0]))
    return step_of(folder)


def _looks_whole(folder: Path) -> bool:
    try:
        return not verify_quickly(folder)[1]
    except ToolkitError:  # of another version of the format
        return False
