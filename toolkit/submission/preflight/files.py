"""Files that a job needs before its ranks do: folders of logs, which Slurm does not make, and a program that can start."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.config.resolved import ResolvedJob
from toolkit.runs.record.job import sbatch_words
from toolkit.slurm.sbatch_options import last_value_of, value_of
from toolkit.submission.preflight.finding import About, Finding

__all__ = ["check_files"]

_LONGEST_SHEBANG = 256  # what Linux reads of it, execve(2)
_ELF = b"\x7fELF"


def check_files(job: ResolvedJob, extra_sbatch_options: Sequence[str] = ()) -> Iterator[Finding]:
    """What this host can see of the files; `once` are sbatch's options of this submission alone."""
    yield from _log_folders(About(job, "log_folder"), (*sbatch_words(job), *extra_sbatch_options), extra_sbatch_options)
    if isinstance(job.job.entry, list) and not (job.container.image or job.site_container.image):
        yield from _program(About(job, "program"), job.job.entry[0], job.job_directory)


def _log_folders(about: About, words: Sequence[str], extra_sbatch_options: Sequence[str]) -> Iterator[Finding]:
    """Return findings on `-o` and `-e`. If the folder is missing, Slurm ends the job without a log."""
    at = Path(last_value_of(words, "chdir", "D") or ".")
    for name, letter in (("output", "o"), ("error", "e")):
        written = last_value_of(words, name, letter)
        folder = written.rpartition("/")[0]
        if not folder or "%" in folder or written.startswith("/dev/"):
            continue  # beside the submission, or only Slurm knows it
        path = at / folder
        is_flag = any(value_of(word, name, letter) is not None for word in extra_sbatch_options)
        where = f"-{letter} {written}" if is_flag else "job.sbatch"
        if not path.is_dir():
            fix = f"mkdir -p {shlex.quote(str(path))}"
            yield about.refuse(where, f"there is no folder {path} for --{name}, and Slurm makes none", fix)
        elif not os.access(path, os.W_OK | os.X_OK):
            yield about.refuse(where, f"you cannot write into {path}, where --{name} goes", "give another folder")


def _program(about: About, written: str, directory: Path) -> Iterator[Finding]:
    """A program by its path; of a name alone the nodes' PATH decides."""
    if "/" not in written:
        return
    path = directory / written
    if not path.exists():  # where it is relative, that was refused before
        yield about.warn("job.entry", f"there is no {path} on this host", "check that the nodes have it")
        return
    if not path.is_file() or not os.access(path, os.X_OK):
        fix = f"chmod +x {shlex.quote(str(path))}" if path.is_file() else "name a program"
        yield about.refuse("job.entry", f"{path} is not executable", fix)
        return
    try:
        with path.open("rb") as stream:
            first = stream.read(_LONGEST_SHEBANG)
    except OSError:  # it may be run, and not read
        return
    if first.startswith(b"#!"):
        yield from _interpreter(about, path, first)
    elif not first.startswith(_ELF):
        yield about.refuse(
            "job.entry",
            f"{path} is not a program: it has no #! line, and is not compiled for Linux",
            'begin it with a line such as "#!/bin/bash"',
        )


def _interpreter(about: About, path: Path, first: bytes) -> Iterator[Finding]:
    line = first.partition(b"\n")[0].decode("utf-8", "replace")
    if line.endswith("\r"):
        yield about.refuse(
            "job.entry",
            f"the lines of {path} end as on Windows, so that its interpreter is not found",
            f"sed -i 's/\\r$//' {shlex.quote(str(path))}",
        )
        return
    words = line.removeprefix("#!").split()
    if not words:
        yield about.refuse("job.entry", f"the #! line of {path} names no interpreter", 'write "#!/bin/bash"')
    elif not Path(words[0]).is_absolute() or shutil.which(words[0]) is None:
        yield about.refuse(
            "job.entry", f"{path} is to be run by {words[0]}, which is not on this host", "fix its #! line"
        )
