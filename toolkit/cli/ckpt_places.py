"""Which checkpoints RUN means: a run, `RUN:STEP`, or a path to a run, a `checkpoints` folder or one checkpoint."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.places import site_runs
from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError
from toolkit.talk import say

if TYPE_CHECKING:
    from toolkit.checkpoint.errors import CorruptCheckpointError
    from toolkit.checkpoint.format.manifest import Manifest

_WITH_STEP = re.compile(r"(.+):(\d{1,18})")
_STEPS_SHOWN = 20
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST)


def all_folders(named: str, runs: Path | None, step: int | None = None) -> list[Path]:
    """All checkpoint folders that RUN means, committed or not, the oldest step first; of a step those of its name.

    Raises:
        NotFoundError: there are none, or none of that step.
        OwnFailureError: this host may not read them, or cannot.
    """
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
    found = [folder for folder in folders if steps[folder] == step]
    if not found:
        known = list(dict.fromkeys(number for number in steps.values() if number is not None))
        fix = f"choose one of the steps {_listed(known)}" if known else "leave the step out"
        raise NotFoundError(f"there is no checkpoint of step {step}", where=named, fix=fix)
    return found


def committed_folders(named: str, runs: Path | None, step: int | None) -> list[Path]:
    """The committed checkpoints that RUN means, the oldest first, damaged ones too; or the one folder that it names.

    Raises:
        NotFoundError: there are none, or none of that step.
        OwnFailureError: this host may not read them, or cannot.
    """
    from toolkit.checkpoint.folder.listing import checkpoint_folders
    from toolkit.checkpoint.format.layout import step_of

    named, step = with_step(named, step)
    place = folder_of(named, runs)
    folders = checkpoint_folders(place)
    if folders == [place] and (step is None or step == step_of(place)):
        return folders
    steps = {number: folder for folder in folders if (number := step_of(folder)) is not None}
    if step is not None and step in steps:
        return [steps[step]]
    if step is None and steps:
        return list(steps.values())
    raise NotFoundError(
        "there is no committed checkpoint" + ("" if step is None else f" of step {step}"),
        where=named,
        fix=f"choose one of the steps {_listed(list(steps))}" if steps else "wait for the run to save one",
    )


def one_folder(named: str, runs: Path | None, step: int | None = None) -> Path:
    """The newest of the committed checkpoints that RUN means, or the one of a step; as `committed_folders`."""
    return committed_folders(named, runs, step)[-1]


def manifest_of(folder: Path) -> Manifest:
    """What a checkpoint holds, to look at it; that its folder has the name of another step is said on stderr.

    Raises:
        CorruptCheckpointError: its manifest is missing or damaged; the steps beside it are named.
        OwnFailureError: this host may not read it, or cannot.
    """
    from toolkit.checkpoint.folder.verify import open_manifest

    with another_named(folder):
        manifest = open_manifest(folder)
    if wrong := _wrong_name(folder, manifest):
        say(str(wrong))
    return manifest


def manifest_to_take(folder: Path) -> Manifest:
    """What a checkpoint holds, to take it elsewhere: as `manifest_of`, but what no load takes is refused.

    Raises:
        CorruptCheckpointError: also where the folder has the name of another step.
    """
    from toolkit.checkpoint.folder.verify import open_manifest

    with another_named(folder):
        manifest = open_manifest(folder)
    if wrong := _wrong_name(folder, manifest):
        raise wrong
    return manifest


def _wrong_name(folder: Path, manifest: Manifest) -> CorruptCheckpointError | None:
    """A checkpoint may be whole, and its folder be named after another step."""
    from toolkit.checkpoint.errors import CorruptCheckpointError
    from toolkit.checkpoint.format.layout import MANIFEST, step_folder, step_of

    named = step_of(folder)
    if named is None or named == manifest.step:
        return None
    right = step_folder(folder.parent, manifest.step)
    fix = f"mv {folder} {right}" if not right.exists() else f"compare it with {right.name}, and remove one of them"
    message = f"is of step {manifest.step}, the folder is named after step {named}"
    return CorruptCheckpointError(message, where=str(folder / MANIFEST), fix=fix)


@contextmanager
def another_named(folder: Path) -> Iterator[None]:
    """While a checkpoint is read: where it is damaged, the steps beside it are named.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    from toolkit.checkpoint.errors import CorruptCheckpointError
    from toolkit.checkpoint.format.layout import committed_steps

    try:
        yield
    except CorruptCheckpointError as error:
        beside = [step for step, other in committed_steps(folder.parent).items() if other.name != folder.name]
        fix = f"choose another step: {_listed(beside)}" if beside else "no other checkpoint stands beside it"
        raise CorruptCheckpointError(error.message, where=error.where, fix=fix) from None


def with_step(named: str, step: int | None = None) -> tuple[str, int | None]:
    """`RUN:400` as RUN and 400; a colon may also be a part of a path.

    Raises:
        ToolkitError: `step` is another one.
    """
    match = _WITH_STEP.fullmatch(named)
    if match is None or Path(named).exists():
        return named, step
    if step is not None and step != int(match[2]):
        raise ToolkitError(f"names step {match[2]}, and --step says {step}", where=named, fix="leave one of them out")
    return match[1], int(match[2])


def folder_of(named: str, runs: Path | None) -> Path:
    """The folder that RUN means; what is no path is looked up below `runs`."""
    from toolkit.rundir.find import find_run, typed_path

    refuse_empty("RUN", named)
    path = typed_path(named)
    if path.is_dir():
        return path.absolute()
    if path.exists():
        from toolkit.checkpoint.convert.imports import format_of_name

        inside = (path.parent / "manifest.json").exists()
        fix = f"name its folder, {path.parent}" if inside else "name a run, its checkpoints folder or one step folder"
        if format_of_name(path) is not None and not inside:
            fix += "; `toolkit ckpt import` makes a checkpoint of other files"
        raise NotFoundError("is a file, and no checkpoint's folder", where=named, fix=fix)
    if "/" in named and path.parent.is_dir():
        there = sorted(folder.name for folder in path.parent.iterdir() if folder.name.startswith("step-"))
        fix = f"there are: {_listed(there)}" if there else f"look into {path.parent}"
        raise NotFoundError("there is no such folder", where=named, fix=fix)
    return find_run(named, site_runs(runs))


def refuse_empty(argument: str, named: str = "") -> None:
    """The empty path is the current folder, which nobody who types it means.

    Raises:
        ToolkitError: `named` is empty.
    """
    if not named:
        fix = "name one (. is this folder); is a variable of the shell not set?"
        raise ToolkitError("is empty", where=argument, fix=fix)


@contextmanager
def changing(folder: Path, verb: str, *, when_full: str) -> Iterator[None]:
    """What the system refuses while something in `folder` is changed; `verb` says what was to be done, as "removed".

    Raises:
        ToolkitError: this user may not, or nothing can be written there.
        OwnFailureError: the disk is full; `when_full` is the fix.
    """
    try:
        yield
    except OSError as error:
        where, message = str(folder), f"cannot be {verb}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OwnFailureError(message, where=where, fix=when_full) from None
        if error.errno == errno.EROFS:
            raise ToolkitError(message, where=where, fix="do it on a host that can write there") from None
        if error.errno in _IN_THE_WAY:
            raise ToolkitError(message, where=where, fix=f"remove or rename what stands at {folder}") from None
        if not isinstance(error, PermissionError):
            raise
        raise ToolkitError(message, where=where, fix="ask the owner of the run") from None


def _listed(names: list[int] | list[str]) -> str:
    """All names, of many only the last."""
    shown = ", ".join(map(str, names[-_STEPS_SHOWN:]))
    return shown if len(names) <= _STEPS_SHOWN else f"..., {shown}"
