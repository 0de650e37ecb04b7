"""Check that the ranks can start, read and save as the job requests, as far as this host can determine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.data import matches
from toolkit.config.entry import files_of_entry, script_of
from toolkit.config.layout_checks import check_roll_back
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.errors import ToolkitError
from toolkit.slurm.sbatch_options import last_value_of
from toolkit.supervise.launch import is_unmanaged

if TYPE_CHECKING:
    from toolkit.checkpoint.format.manifest import Manifest

__all__ = [
    "check_adapter_files", "check_arguments", "check_beginning", "check_bench", "check_codec", "check_data", "check_guard", "check_model_folder", "check_source",
    "check_whole",
]  # fmt: skip


def check_beginning(job: ResolvedJob, options: Sequence[str] = ()) -> None:
    """Run all checks for the first start of a run; `options` are the sbatch options for this submission only.

    Raises:
        ToolkitError: the ranks could not start, read or save as the job requests.
    """
    check_source(job, options)
    check_adapter_files(job, options)
    check_data(job, options)
    check_codec(job)
    check_arguments(job)
    check_model_folder(job, options)
    check_bench(job)
    check_guard(job)


def check_source(job: ResolvedJob, options: Sequence[str] = ()) -> None:
    """Check `checkpoint.source` on this host, in the same way as the ranks will.

    Only the ranks can check a path inside a container, or a checkpoint that another job will write. `options` are the
    sbatch options of this submission, which may contain the dependency on that job.

    Raises:
        ToolkitError: the folder does not exist, or the job cannot start from it in the requested way.
    """
    source = job.checkpoint.source
    path = job.job_directory / source
    if not source or _is_elsewhere(path, job) or _waits(job, options):
        return
    where = job.origin("checkpoint.source").place("checkpoint.source")
    if said := _no_checkpoint(path):
        raise ToolkitError(said, where=where, fix=_fix_of(path, source))
    manifest = check_whole(path, where=where)
    if not is_unmanaged(job.job.entry):  # only a script knows what it loads and how it counts steps
        _check_use(job, path, manifest, where=where)


def check_adapter_files(job: ResolvedJob, options: Sequence[str] = ()) -> None:
    """Raise a ToolkitError if `adapters.base` or `adapters.source` is missing on this host."""
    for name, given in (("base", job.adapters.base), ("source", job.adapters.source)):
        path = job.job_directory / given
        if given and not path.exists() and not _is_elsewhere(path, job) and not _waits(job, options):
            where = job.origin(f"adapters.{name}").place(f"adapters.{name}")
            raise ToolkitError(f"{path} not found", where=where, fix=_fix_of(path, given))


def _check_use(job: ResolvedJob, path: Path, manifest: Manifest, *, where: str) -> None:
    """Check that the job can start from a checkpoint as `checkpoint.take` requests."""
    said, fix = "", ""
    if job.checkpoint.take == "weights":
        if manifest.is_imported and not any(name.startswith("model.") for name in manifest.tensors):
            said = f"{path} was imported, and has no tensors below `model`"
            fix = "import the file again with --under model"
    elif manifest.is_imported:
        said = f"{path} was imported, and has no training state to resume from"
        fix = 'set checkpoint.take to "weights"'
    elif "train.steps" in job.origins and manifest.step >= job.train.steps:  # if unset, the job may count its own steps
        said = f"{path} is at step {manifest.step}, and train.steps is {job.train.steps}: no steps would remain"
        fix = f'set train.steps above {manifest.step}, or checkpoint.take to "weights", which starts at step 0'
    if said:
        raise ToolkitError(said, where=where, fix=fix)


def check_whole(checkpoint: Path, *, where: str) -> Manifest:
    """Check a checkpoint quickly, as ranks do before they start from it; return its manifest.

    Raises:
        ToolkitError: it is damaged, or cannot be read on this host; the message names `where` as the place.
    """
    from toolkit.checkpoint.errors import CorruptCheckpointError
    from toolkit.checkpoint.folder.choice import good_manifest

    try:
        return good_manifest(checkpoint)
    except CorruptCheckpointError as error:
        fix = (
            f"choose another one; `toolkit ckpt verify {shlex.quote(str(checkpoint))}` lists every problem of this one"
        )
        raise ToolkitError(f"{checkpoint} is damaged: {error.message}", where=where, fix=fix) from None
    except ToolkitError as error:
        place = error.where if error.where != where else ""
        raise ToolkitError(": ".join(filter(None, (place, error.message))), where=where, fix=error.fix) from None
    except OSError as error:
        fix = "choose a checkpoint that you can read on this host"
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
            f"{error.message}, but {sys.executable}, which also runs the ranks, does not have it",
            where=job.origin("checkpoint.compression").place("checkpoint.compression"),
            fix=f'{error.fix}, or compression = "gzip"',
        ) from None


def check_data(job: ResolvedJob, options: Sequence[str] = ()) -> None:
    """Check that each pattern in `data.paths` matches a file; the ranks check paths that this host cannot see.

    Raises:
        ToolkitError: a pattern matches no file on this host.
    """
    if _waits(job, options):
        return
    for pattern in job.data.paths:
        is_address = "://" in pattern  # of an object store, which the job reads through its own library
        if is_address or _is_elsewhere(job.job_directory / pattern, job):
            continue
        if next(matches(pattern, job.job_directory), None) is None:
            raise ToolkitError(
                f"no file on this host matches {pattern!r}",
                where=job.origin("data.paths").place("data.paths"),
                fix=f"list files that this host and every node can read; relative patterns start at {job.job_directory}",
            )


def check_arguments(job: ResolvedJob) -> None:
    """Check `[args]` against the arguments that the job script declares, if it uses `read_arguments`.

    Raises:
        ToolkitError: the ranks would refuse a key or a value.
    """
    script = _script_of(job)
    if script is None:
        return
    from toolkit.train.arguments import check_divided, read_arguments
    from toolkit.train.declared_arguments import declared_arguments

    declared = declared_arguments(script)
    if declared is None:
        return
    try:
        check_divided(
            read_arguments(declared, job.args), {"parallel.tp": job.parallel.tp, "parallel.cp": job.parallel.cp}
        )
    except ToolkitError as error:
        raise job.placed(error) from None


def check_model_folder(job: ResolvedJob, options: Sequence[str] = ()) -> None:
    """Check the folder in `args.model` of a job that opens it with `open_folder`, as its ranks will.

    Raises:
        ToolkitError: there is no such folder, toolkit cannot train its model, or its tokenizer has no chat template.
    """
    script, given = _script_of(job), job.args.get("model")
    if (
        script is None
        or not (isinstance(given, str) and given)
        or "open_folder" not in script.read_text(errors="replace")
    ):
        return
    folder = job.job_directory / given
    if _is_elsewhere(folder, job) or _waits(job, options):
        return
    from toolkit.train.arguments import read_arguments
    from toolkit.train.declared_arguments import declared_arguments
    from toolkit.train.huggingface.folder import check_fit, read_folder

    if not folder.is_dir():
        fix = f"pass an absolute path; a relative one starts at {job.job_directory}, the folder of the job file"
        raise job.placed(ToolkitError(f"folder not found: {folder}", where="args.model", fix=fix))
    try:
        settings, tokenizer = read_folder(folder)
        declared = declared_arguments(script)
        args: Any = read_arguments(declared, job.args) if declared is not None else None
        if hasattr(args, "context") and hasattr(args, "packed"):
            check_fit(settings, job, args.context, is_packed=args.packed)
        if "check_template" in script.read_text(errors="replace") and not _has_template(folder, tokenizer):
            fix = "set args.model to the folder of a model for chat, whose tokenizer_config.json has a chat_template"
            raise ToolkitError(f"the tokenizer of {folder} has no chat template", where="args.model", fix=fix)
    except ToolkitError as error:
        if error.where.startswith(str(folder)):
            error.message, error.where = f"{error.where}: {error.message}", "args.model"
        raise job.placed(error) from None


def _has_template(folder: Path, tokenizer: Mapping[str, Any]) -> bool:
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    return bool(tokenizer.get("chat_template")) or any((folder / name).exists() for name in files)


def _script_of(job: ResolvedJob) -> Path | None:
    """Return the file with the function of the entry, also of a module in the job folder; None for other entries."""
    if is_unmanaged(job.job.entry):
        return None
    found = script_of(job) or next((job.code_folder / name for name in files_of_entry(job)), None)
    return found if found is not None and found.is_file() else None


def check_guard(job: ResolvedJob, *, has_checkpoint: bool = False) -> None:
    """Check that `train.guard` can roll back to a checkpoint that exists or will exist.

    Raises:
        ToolkitError: it cannot.
    """
    if is_unmanaged(job.job.entry):
        return
    try:
        check_roll_back(job.train, job.checkpoint, has_one=has_checkpoint)
    except ToolkitError as error:
        raise job.placed(error) from None


def check_bench(job: ResolvedJob) -> None:
    """Check `[args]` of the shipped `bench_collectives` as its ranks will, as far as the shape of the job allows.

    Raises:
        ToolkitError: these ranks cannot measure what it requests.
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
        return f"expected a checkpoint folder, got the file {path}"
    if (path / "manifest.json").exists():
        return ""
    return f"{path} {'contains checkpoints but is not one itself' if _newest_in(path) else 'is not a checkpoint: it has no manifest.json'}"


def _fix_of(path: Path, source: str) -> str:
    if inside := _newest_in(path):
        return f"choose one of them, as in source = {str(Path(source) / inside)!r}"
    if beside := _newest_in(path.parent):
        return f"choose an existing one, such as {str(path.parent / beside)!r}"
    return (
        "pass the path of a step-... folder; `toolkit ckpt ls RUN` lists the checkpoints of a run, and `toolkit ckpt import` converts "
        "other formats"
    )


def _newest_in(path: Path) -> Path | None:
    """Return the newest checkpoint in a `checkpoints` folder or in a run, as a relative path."""
    from toolkit.checkpoint.format.layout import committed_steps

    for folder in (path, path / "checkpoints"):
        if steps := committed_steps(folder):
            return steps[max(steps)].relative_to(path)
    return None


def _is_elsewhere(path: Path, job: ResolvedJob) -> bool:
    """Return whether ranks may see files at `path` that this host does not: in a container, or on a local disk."""
    local = job.paths.local_scratch
    return not path.is_relative_to(job.job_directory) and (
        _has_image(job) or (bool(local) and path.is_relative_to(local))
    )


def _waits(job: ResolvedJob, options: Sequence[str]) -> bool:
    """Return whether the job depends on another one, which may create the files that it needs."""
    return bool(last_value_of((*job.job.sbatch, *options), "dependency", "d"))


def _has_image(job: ResolvedJob) -> bool:
    return bool(job.container.image or job.site_container.image)
