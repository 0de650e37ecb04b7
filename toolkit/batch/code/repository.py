"""What git says of a job's folder: its files, its commit, what is not committed; and that commit in another folder."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from toolkit.errors import CheckFailedError

DIFF_LIMIT_BYTES = 200_000
ANSWER_S = 20.0


def new_and_tracked_files(folder: Path, *, leave_out: Path) -> list[str] | None:
    """The files below `folder` that git tracks or would add, relative to it; None where it is in no repository.

    Where the repository ignores the folder itself it is another project's, such as that of a home folder.
    """
    prefix = call_git(folder, "rev-parse", "--show-prefix")
    if prefix is None or call_git(folder, "check-ignore", "--quiet", ".") is not None:
        return None
    arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if leave_out.is_relative_to(folder) and leave_out != folder:  # thousands of files that nobody told git to ignore
        arguments.append(f"--exclude=/{prefix.strip()}{leave_out.relative_to(folder)}/")
    listed = call_git(folder, *arguments)
    return None if listed is None else [name for name in listed.split("\0") if name]


def code_state(folder: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the job's repository; {} outside one or without git."""
    commit = call_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    state: dict[str, Any] = {"commit": commit.strip()}
    diff = call_git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--binary")
    if diff is None:  # git did not answer in time; nothing is claimed
        return state
    state["clean"] = not diff
    size = len(diff.encode(errors="surrogateescape"))
    if size > DIFF_LIMIT_BYTES:
        state["diff_left_out"] = f"{size} bytes, more than {DIFF_LIMIT_BYTES}"
    elif diff:
        state["diff"] = diff
    return state


def check_out(folder: Path, code: dict[str, Any], target: Path) -> Path:
    """Write a recorded state of the repository around `folder` to the new folder `target`; `folder`'s place in it.

    Files that git did not track then are not in it.

    Raises:
        CheckFailedError: the commit is gone, its changes were not kept, or they do not fit it.
    """
    commit, where = code["commit"], str(folder)
    prefix = call_git(folder, "rev-parse", "--show-prefix")
    root = call_git(folder, "rev-parse", "--show-toplevel")
    if prefix is None or root is None or call_git(folder, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise CheckFailedError(
            f"the run's commit {commit[:12]} is not here", where=where, fix=f"`git -C {folder} fetch origin {commit}`"
        )
    if "diff_left_out" in code:
        raise CheckFailedError(
            f"the changes beside commit {commit[:12]} were not kept ({code['diff_left_out']})",
            where=where,
            fix='commit them, and `toolkit submit` again; with [job] snapshot = "copy" their files are kept',
        )
    target.mkdir(mode=0o700)
    _unpack(Path(root.removesuffix("\n")), commit, target)
    if "diff" in code:
        _apply(code["diff"], target)
    return target / prefix.removesuffix("\n")


def _unpack(root: Path, commit: str, target: Path) -> None:
    with subprocess.Popen(["git", "-C", str(root), "archive", commit], stdout=subprocess.PIPE) as archive:
        assert archive.stdout is not None
        with tarfile.open(fileobj=archive.stdout, mode="r|") as stream:
            stream.extractall(target, filter="data")


def _apply(diff: str, target: Path) -> None:
    # Above the run there may be a repository, of which git would take the paths in the diff to be.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(target.parent)}
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=target, env=environment, input=diff, text=True, errors="surrogateescape", capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CheckFailedError(
            f"the recorded changes do not fit their commit: {done.stderr.strip().splitlines()[0]}",
            where=str(target),
            fix="`toolkit submit` the job as it is now",
        )


def call_git(folder: Path, *arguments: str) -> str | None:
    """What git prints about a folder; None where it refuses, is not installed, or does not answer in `ANSWER_S`."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=ANSWER_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
