"""Check keys of `[args]` that a command sets or sweeps, if the function does not declare its arguments."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit.config.document import leaves, read_document
from toolkit.config.entry import files_of_entry
from toolkit.config.program_document import is_not_job_file
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.config.table import nearest
from toolkit.submission.preflight.finding import About, Finding
from toolkit.supervise.launch import is_unmanaged

__all__ = ["check_set_arguments"]


def check_set_arguments(
    job: ResolvedJob, swept: Mapping[str, str] | None = None, recorded: Path | None = None
) -> Iterator[Finding]:
    """Warn about keys that neither the job file nor its function contains; refuse them in a sweep.

    `swept` has the place of each swept key: with a key that the function does not read, all tasks compute the same.
    `recorded` is the copy of the job file of an existing run.
    """
    job_file = recorded or job.job_file
    swept, typed = swept or {}, ("flag", "TOOLKIT_*")
    places = {key: one.detail for key, one in job.origins.items() if one.layer in typed} | {**swept}
    given = {key: place for key, place in places.items() if key.startswith("args.")}
    files = [job.code_folder / name for name in files_of_entry(job)]
    if not given or is_unmanaged(job.job.entry) or not files or not job_file.is_file() or _declares(files[0]):
        return
    is_program = is_not_job_file(job_file, once=job.job.once)
    stated = {} if is_program else read_document(job_file).values.get("args", {})
    paths = [path for path, _ in leaves(stated)]
    known = {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
    read = _names_in(files[0])
    for key, place in given.items():
        path, name = key.removeprefix("args."), key.rpartition(".")[2]
        close = nearest(path, known) or nearest(name, read)
        if path in known or name in read or not (known or close):
            continue
        what = f"{key} is neither in [args] of {job.job_file.name} nor in {files[0].name}"
        fix = f"write args.{close[0]}" if close else f"add {name} to [args] of {job.job_file.name}"
        if key in swept:
            yield About(job, "args").refuse(place, f"{what}, so all tasks may compute the same", fix)
        else:
            yield About(job, "args").warn(place, what, fix)


def _declares(script: Path) -> bool:
    from toolkit.train.declared_arguments import declared_arguments

    # `check_arguments` and `check_bench` refuse unknown keys.
    return declared_arguments(script) is not None or script.with_suffix(".toml") in shipped_jobs().values()


def _names_in(script: Path) -> set[str]:
    """Return the strings, attributes and keywords in a script; none if it is not valid Python of this version."""
    try:
        nodes = [*ast.walk(ast.parse(script.read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return set()
    strings = {one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return (
        strings
        | {one.attr for one in nodes if isinstance(one, ast.Attribute)}
        | {one.arg for one in nodes if isinstance(one, ast.arg)}
    )
