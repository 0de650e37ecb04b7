"""Checks that the ranks can start, read and save as the job requests, as far as this host can determine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config.data import matches
from toolkit.config.entry import script_of
from toolkit.config.layout_checks import check_roll_back
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.errors import ToolkitError
from toolkit.slurm.sbatch_options import last_value_of
from toolkit.supervise.launch import is_unmanaged

if TYPE_CHECKING:
    from toolkit.checkpoint.format.manifest import Manifest

__all__ = [
    "check_arguments", "check_beginning", "check_bench", "check_codec", "check_data", "check_guard", "check_source",
    "check_whole",
]  # fmt: skip


def check_beginning(job: ResolvedJob, options: Sequence[str] = ()) -> None:
    """Make every check for the first start of a run; `options` are sbatch's for this submission alone.

    Raises:
        ToolkitError: the ranks could not begin, read or save as the job says.
    """
    check_source(job, options)
    check_data(job, options)
    check_codec(job)
    check_arguments(job)
    check_bench(job)
    check_guard(job)


def check_source(job: ResolvedJob, options: Sequence[str] = ()) -> None:
    """Check `checkpoint.source` as the ranks will: quickly, and the whole folder.

    As the entry's file, it must be there for this host, too. What cannot be known is left to the ranks: a container has
    folders of its own, and a job that waits for another, by sbatch's `options`, may wait for its checkpoint.

    Raises:
        ToolkitError: there is no such folder, or it is not a checkpoint that the job can start from
            as it says.
    """
    source = job.checkpoint.source
    path = job.job_directory / source
    if not source or _is_elsewhere(path, job) or _waits(job, options):
        return
    where = job.origin("checkpoint.source").place("checkpoint.source")
    if said := _no_checkpoint(path):
        raise ToolkitError(said, where=where, fix=_fix_of(path, source))
    manifest = check_whole(path, where=where)
    if not is_unmanaged(job.job.entry):  # what a script takes of it, and how it counts steps, only the script knows
        _check_use(job, path, manifest, where=where)


def _check_use(job: ResolvedJob, path: Path, manifest: Manifest, *, where: str) -> None:
    """Check that the job can start from a checkpoint as `checkpoint.take` requests."""
    said, fix = "", ""
    if job.checkpoint.take == "weights":
        if manifest.is_imported and not any(name.startswith("model.") for name in manifest.tensors):
            said = f"{path} was imported, and has no tensors below `model`"
            fix = "import it again, with --under model"
    elif manifest.is_imported:
        said = f"{path} was imported, and has no training state to resume from"
        fix = 'set checkpoint.take to "weights"'
    elif "train.steps" in job.origins and manifest.step >= job.train.steps:  # else the job may count its own
        said = f"{path} is at step {manifest.step}, and train.steps is {job.train.steps}: no steps would remain"
        fix = f'set train.steps above {manifest.step}, or checkpoint.take to "weights", which begins at step 0'
    if said:
        raise ToolkitError(said, where=where, fix=fix)


def check_whole(checkpoint: Path, *, where: str) -> Manifest:
    """Check a checkpoint quickly, as ranks do before they start from it; return its content.

    Raises:
        ToolkitError: it is damaged, or cannot be read here; `where` is its place.
    """
    from toolkit.checkpoint.errors import CorruptCheckpointError
    from toolkit.checkpoint.folder.choice import good_manifest

    try:
        return good_manifest(checkpoint)
    except CorruptCheckpointError as error:
        fix = f"name another; `toolkit ckpt verify {shlex.quote(str(checkpoint))}` lists every problem of this one"
        raise ToolkitError(f"{checkpoint} is damaged: {error.message}", where=where, fix=fix) from None
    except ToolkitError as error:
        place = error.where if error.where != where else ""
        raise ToolkitError(": ".join(filter(None, (place, error.message))), where=where, fix=error.fix) from None
    except OSError as error:
        fix = "name a folder that this host and you may read"
        raise ToolkitError(f"{checkpoint} cannot be read here: {error.strerror}", where=where, fix=fix) from None


def check_codec(job: ResolvedJob) -> None:
    """Check for the library that `checkpoint.compression` needs. The ranks run in the environment of this command, or a copy of it.

    Raises:
        ToolkitError: it is not installed here.
    """
    if job.checkpoint.compression != "zstd" or _has_image(job) or isinstance(job.env.stage, str):
        return
    from toolkit.checkpoint.format.filters import check_compression

    try:
        check_compression(job.checkpoint.compression)
    except ToolkitError as error:
        raise ToolkitError(
            f"{error.message}, and {sys.executable}, which the ranks run in, too, does not have it",
            where=job.origin("checkpoint.compression").place("checkpoint.compression"),
            fix=f'{error.fix}, or compression = "gzip"',
        ) from None


def check_data(job: ResolvedJob, options: Sequence[str] = ()) -> None:
    """Check that each of `data.paths` matches a file; ranks check what this host cannot see, as in `check_source`.

    Raises:
        ToolkitError: one of them names nothing here.
    """
    if _waits(job, options):
        return
    for pattern in job.data.paths:
        is_address = "://" in pattern  # of a store that a job reads by a library of its own
        if is_address or _is_elsewhere(job.job_directory / pattern, job):
            continue
        if next(matches(pattern, job.job_directory), None) is None:
            raise ToolkitError(
                f"nothing here matches {pattern!r}",
                where=job.origin("data.paths").place("data.paths"),
                fix=f"name files that this host and every node can read; relative patterns start at {job.job_directory}",
            )


def check_arguments(job: ResolvedJob) -> None:
    """Check `[args]` against the declarations of the job's script, if it reads them by `read_arguments`.

    Raises:
        ToolkitError: the ranks would refuse a key or a value.
    """
    script = script_of(job)
    if script is None or is_unmanaged(job.job.entry):
        return
    from toolkit.train.arguments import check_divided, read_arguments
    from toolkit.train.declared_arguments import declared_arguments

    declared = declared_arguments(script)
    if declared is None:
        return
    try:
        check_divided(read_arguments(declared, job.args), {"parallel.tp": job.parallel.tp})
    except ToolkitError as error:
        raise job.placed(error) from None


def check_guard(job: ResolvedJob, *, has_checkpoint: bool = False) -> None:
    """Check that `train.guard` can roll back to a checkpoint that exists or will exist.

    Raises:
        ToolkitError: it could not.
    """
    if is_unmanaged(job.job.entry):
        return
    try:
        check_roll_back(job.train, job.checkpoint, has_one=has_checkpoint)
    except ToolkitError as error:
        raise job.placed(error) from None


def check_bench(job: ResolvedJob) -> None:
    """Check `[args]` of the shipped `bench_collectives` as its ranks will, as far as the job's shape allows.

    Raises:
        ToolkitError: it is nothing that these ranks could measure.
    """
    if script_of(job) != shipped_jobs()["bench_collectives"].with_suffix(".py"):
        return
    from toolkit.comm.bench.request import BenchRequest
    from toolkit.train.arguments import read_arguments

    try:
        read_arguments(BenchRequest, job.args).check_shape(job.job)
    except ToolkitError as error:
        raise job.placed(error) from None


def _no_checkpoint(path: Path) -> str:
    """Return why a path cannot be a checkpoint; "" if it has a manifest."""
    if not path.exists():
        return f"there is no folder {path}"
    if not path.is_dir():
        return f"{path} is a file, and a checkpoint is a folder"
    if (path / "manifest.json").exists():
        return ""
    return f"{path} {'contains checkpoints and is not one itself' if _newest_in(path) else 'is not a checkpoint: it has no manifest.json'}"


def _fix_of(path: Path, source: str) -> str:
    if inside := _newest_in(path):
        return f"name one of them, as in source = {str(Path(source) / inside)!r}"
    if beside := _newest_in(path.parent):
        return f"name an existing one, such as {str(path.parent / beside)!r}"
    return (
        "pass the path of a step-... folder; `toolkit ckpt ls RUN` shows those of a run, and `toolkit ckpt import` makes "
        "one of other formats"
    )


def _newest_in(path: Path) -> Path | None:
    """Return the newest checkpoint in a `checkpoints` folder or in a run, as a relative path."""
    from toolkit.checkpoint.format.layout import committed_steps

    for folder in (path, path / "checkpoints"):
        if steps := committed_steps(folder):
            return steps[max(steps)].relative_to(path)
    return None


def _is_elsewhere(path: Path, job: ResolvedJob) -> bool:
    """Return whether the ranks may see files at `path` that this host does not: in a container, or on a node's own disk."""
    local = job.paths.local_scratch
    return not path.is_relative_to(job.job_directory) and (
        _has_image(job) or (bool(local) and path.is_relative_to(local))
    )


def _waits(job: ResolvedJob, options: Sequence[str]) -> bool:
    """Return whether another job comes first, which may create what this one needs."""
    return bool(last_value_of((*job.job.sbatch, *options), "dependency", "d"))


def _has_image(job: ResolvedJob) -> bool:
    return bool(job.container.image or job.site_container.image)
