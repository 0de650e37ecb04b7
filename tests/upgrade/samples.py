"""Unpack the runs that an old version made, and write commands that act as a Slurm without their jobs."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

FOLDER_MARK = "/@samples@"
PYTHON_MARK = "/@python@"
JOB_IS_UNKNOWN = {
    "squeue": "exit 0",
    "sacct": "echo 'Slurm accounting storage is disabled' >&2; exit 1",
    "scontrol": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
}


def write_fake_slurm(folder: Path, commands: Mapping[str, str]) -> None:
    folder.mkdir()
    for name, line in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)


def environment_of(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with the samples' runs, site and sessions, and without a job or settings of the caller."""
    rest = {name: value for name, value in environment.items() if not name.startswith(("SLURM", "SBATCH", "TOOLKIT_"))}
    places = {
        "HOME": str(folder / "home"),
        "TOOLKIT_RUNS": str(folder / "runs"),
        "TOOLKIT_SITE": str(folder / "here.toml"),
        "OMP_NUM_THREADS": "1",
    }
    return {**rest, **places}


def unpack(packed: Path, folder: Path) -> None:
    """Unpack into `folder`. Records name their own run by its path, so the marks in them become real paths."""
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="tar")
    marks = {FOLDER_MARK: str(folder), PYTHON_MARK: sys.executable}
    for file in folder.rglob("*"):
        replace_in(file, marks)
    conf = folder / "cluster" / "etc" / "slurm.conf"
    conf.parent.mkdir(parents=True)
    conf.touch()
    write_fake_slurm(folder / "bin", JOB_IS_UNKNOWN)


def replace_in(file: Path, replacements: Mapping[str, str]) -> None:
    """Replace strings in a UTF-8 file, and keep its mode and times. Binary files name no paths and stay as they are."""
    if not file.is_file() or file.is_symlink():
        return
    try:
        content = changed = file.read_bytes().decode()
    except UnicodeDecodeError:
        return
    for old, new in replacements.items():
        changed = changed.replace(old, new)
    if changed != content:
        times = file.stat()
        file.write_bytes(changed.encode())
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
