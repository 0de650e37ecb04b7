"""Find the checkpoints of RUN: a run, `RUN:STEP`, or a path to a run, a `checkpoints` folder or one checkpoint."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError
from toolkit.runs.named_runs import find
from toolkit.terminal.talk import say

if TYPE_CHECKING:
    from toolkit.checkpoint.errors import CorruptCheckpointError
    from toolkit.checkpoint.format.manifest import Manifest

_WITH_STEP = re.compile(r"(.+):(\d{1,18})")
_STEPS_SHOWN = 20
_PATH_OCCUPIED = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST)


def all_folders(named: str, runs: Path | None, step: int | None = None) -> list[Path]:
    """Return all checkpoint folders of RUN, or of one step, committed or not, the lowest step first."""
    from toolkit.checkpoint.folder.listing import checkpoint_folders
    from toolkit.checkpoint.format.layout import aside_of, step_of

    named, step = with_step(named, step)
    folders = checkpoint_folders(folder_of(named, runs))
    if step is None:
        return folders
    asides = {folder: aside_of(folder) for folder in folders}
    steps = {
        folder: step_of(folder if aside is None else folder.with_name(aside[0])) for folder, aside in asides.items()
    }
    of_step = [folder for folder in folders if steps[folder] == step]
    if not of_step:
        known = list(dict.fromkeys(number for number in steps.values() if number is not None))
        fix = f"choose one of the steps {_listed(known)}" if known else "omit the step"
        raise NotFoundError(f"there is no checkpoint for step {step}", where=named, fix=fix)
    return of_step


def committed_folders(named: str, runs: Path | None, step: int | None) -> list[Path]:
    """Return the committed checkpoints of RUN, lowest step first, damaged ones included; or the named folder."""
    from toolkit.checkpoint.folder.listing import checkpoint_folders
    from toolkit.checkpoint.format.layout import step_of

    named, step = with_step(named, step)
    folder = folder_of(named, runs)
    folders = checkpoint_folders(folder)
    if folders == [folder] and (step is None or step == step_of(folder)):
        return folders
    steps = {number: folder for folder in folders if (number := step_of(folder)) is not None}
    if step is not None and step in steps:
        return [steps[step]]
    if step is None and steps:
        return list(steps.values())
    raise NotFoundError(
        "there is no committed checkpoint" + ("" if step is None else f" for step {step}"),
        where=named,
        fix=f"choose one of the steps {_listed(list(steps))}" if steps else "wait for the run to save one",
    )


def one_folder(named: str, runs: Path | None, step: int | None = None) -> Path:
    """Return the newest committed checkpoint of RUN, or the one of a given step; see `committed_folders`."""
    return committed_folders(named, runs, step)[-1]


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint for inspection; warn if its folder has the name of another step."""
    from toolkit.checkpoint.folder.verify import open_manifest

    with naming_other_steps(folder):
        manifest = open_manifest(folder)
    if wrong := _wrong_name(folder, manifest):
        say(str(wrong))
    return manifest


def manifest_for_export(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint for an export: like `manifest_of`, but reject what a load would reject."""
    from toolkit.checkpoint.folder.verify import open_manifest

    with naming_other_steps(folder):
        manifest = open_manifest(folder)
    if wrong := _wrong_name(folder, manifest):
        raise wrong
    return manifest


def _wrong_name(folder: Path, manifest: Manifest) -> CorruptCheckpointError | None:
    """Return the error for a folder that is named after another step; None if the name is right."""
    from toolkit.checkpoint.errors import CorruptCheckpointError
    from toolkit.checkpoint.format.layout import MANIFEST, step_folder, step_of

    named = step_of(folder)
    if named is None or named == manifest.step:
        return None
    right = step_folder(folder.parent, manifest.step)
    fix = f"mv {folder} {right}" if not right.exists() else f"compare the folder with {right.name}, and remove one"
    message = f"contains step {manifest.step}, but the folder is named after step {named}"
    return CorruptCheckpointError(message, where=str(folder / MANIFEST), fix=fix)


@contextmanager
def naming_other_steps(folder: Path) -> Iterator[None]:
    """Add the other steps of a run to the error if a checkpoint is found to be damaged in the context.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    from toolkit.checkpoint.errors import CorruptCheckpointError
    from toolkit.checkpoint.format.layout import committed_steps

    try:
        yield
    except CorruptCheckpointError as error:
        beside = [step for step, other in committed_steps(folder.parent).items() if other.name != folder.name]
        fix = f"choose another step: {_listed(beside)}" if beside else "there is no other checkpoint"
        raise CorruptCheckpointError(error.message, where=error.where, fix=fix) from None


def with_step(named: str, step: int | None = None) -> tuple[str, int | None]:
    """Return RUN and 400 for `RUN:400`; a path may also contain a colon."""
    match = _WITH_STEP.fullmatch(named)
    if match is None or Path(named).exists():
        return named, step
    if step is not None and step != int(match[2]):
        message = f"RUN names step {match[2]}, but --step is {step}"
        raise ToolkitError(message, where=named, fix=f"omit --step, or :{match[2]}")
    return match[1], int(match[2])


def folder_of(named: str, runs: Path | None, *, changes: bool = False) -> Path:
    """Return the folder of RUN: a path, or a run below `runs`."""
    from toolkit.rundir.files import typed_path

    refuse_empty("RUN", named)
    path = typed_path(named)
    if path.is_dir():
        return path.absolute()
    if path.exists():
        from toolkit.checkpoint.convert.imports import format_of_name

        inside = (path.parent / "manifest.json").exists()
        fix = f"pass its folder, {path.parent}" if inside else "pass a run, its checkpoints folder or one step folder"
        if format_of_name(path) is not None and not inside:
            fix += "; `toolkit ckpt import` converts other files to a checkpoint"
        raise NotFoundError("expected a checkpoint folder, got a file", where=named, fix=fix)
    if "/" in named and path.parent.is_dir():
        existing = sorted(folder.name for folder in path.parent.iterdir() if folder.name.startswith("step-"))
        fix = f"choose one of: {_listed(existing)}" if existing else f"list {path.parent}"
        raise NotFoundError("there is no such folder", where=named, fix=fix)
    return find(named, runs, changes=changes).path


def refuse_empty(argument: str, named: str = "") -> None:
    """Reject an empty path, which would mean the current folder."""
    if not named:
        fix = "pass a path, such as . for the current folder; perhaps a shell variable is not set"
        raise ToolkitError("is empty", where=argument, fix=fix)


@contextmanager
def changing(folder: Path, verb: str, *, when_full: str) -> Iterator[None]:
    """Turn system errors during a change in `folder` into errors with a fix; `verb` names the change, such as "removed".

    Raises:
        ToolkitError: this user may not change it, or the file system is read-only.
        OwnFailureError: the disk is full; `when_full` is the fix.
    """
    try:
        yield
    except OSError as error:
        where, message = str(folder), f"cannot be {verb}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OwnFailureError(message, where=where, fix=when_full) from None
        if error.errno == errno.EROFS:
            raise ToolkitError(message, where=where, fix="run the command on a host that can write there") from None
        if error.errno in _PATH_OCCUPIED:
            raise ToolkitError(message, where=where, fix=f"remove or rename {folder}") from None
        if not isinstance(error, PermissionError):
            raise
        raise ToolkitError(message, where=where, fix="ask the owner for write access") from None


def _listed(names: list[int] | list[str]) -> str:
    """Return the names as a list; only the last ones if there are many."""
    shown = ", ".join(map(str, names[-_STEPS_SHOWN:]))
    return shown if len(names) <= _STEPS_SHOWN else f"..., {shown}"
