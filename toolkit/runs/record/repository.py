"""What git says of a job's folder: its files, its commit, what is not committed; and that commit in another folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from toolkit.errors import CheckFailedError
from toolkit.rundir.files import make_folder

DIFF_LIMIT_BYTES = 200_000
ANSWER_S = 20.0
# What `git apply` can read, whatever the user's configuration makes of a diff for people.
_DIFF = (
    "-c", "diff.relative=false", "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "-U3",
    "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short",
)  # fmt: skip


def new_and_tracked_files(folder: Path, *, leave_out: Path) -> list[str] | None:
    """The files below `folder` that git tracks or would add, relative to it; None where it is in no repository.

    Where the repository ignores the folder itself it is another project's, such as that of a home folder.
    """
    prefix = call_git(folder, "rev-parse", "--show-prefix")
    if prefix is None or call_git(folder, "check-ignore", "--quiet", ".") is not None:
        return None
    arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if leave_out.is_relative_to(folder) and leave_out != folder:  # thousands of files that git does not ignore
        arguments.append(f"--exclude=/{prefix.strip()}{leave_out.relative_to(folder)}/")
    listed = call_git(folder, *arguments)
    return None if listed is None else [name for name in listed.split("\0") if name]


def code_state(folder: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the job's repository; {} outside one or without git."""
    commit = call_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    state: dict[str, Any] = {"commit": commit.strip()}
    diff = call_git(folder, *_DIFF)
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
        CheckFailedError: the commit is gone, its changes were not kept, or git cannot write them.
    """
    commit, where = code["commit"], str(folder)
    prefix = call_git(folder, "rev-parse", "--show-prefix")
    root = call_git(folder, "rev-parse", "--show-toplevel")
    if prefix is None or root is None or call_git(folder, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise CheckFailedError(
            f"the run's commit {commit[:12]} is not here", where=where, fix=f"`git -C {folder} fetch origin {commit}`"
        )
    _check_kept(code, where)
    make_folder(target)
    with TemporaryDirectory(prefix="toolkit-") as folder_of_index:
        _write_state(Path(root.removesuffix("\n")), code, target, Path(folder_of_index))
    return target / prefix.removesuffix("\n")


def _check_kept(code: dict[str, Any], where: str) -> None:
    """Refuse a record that does not tell what was beside the commit: without it other code would run."""
    if "diff" in code or code.get("clean"):
        return
    why = code.get("diff_left_out", f"git did not answer in {ANSWER_S:.0f} s")
    raise CheckFailedError(
        f"the changes beside commit {code['commit'][:12]} were not kept ({why})",
        where=where,
        fix='commit them, and `toolkit submit` again; with [job] snapshot = "copy" their files are kept',
    )


def _write_state(root: Path, code: dict[str, Any], target: Path, folder: Path) -> None:
    """Lay the commit and its changes into an index of its own in `folder`, and write all files of that to `target`.

    git itself writes them as it does in the repository, whose own index and objects are left as they are. (`git archive`
    would omit what .gitattributes keeps from releases.)
    """
    objects = (call_git(root, "rev-parse", "--git-path", "objects") or ".git/objects").removesuffix("\n")
    (folder / "objects" / "info").mkdir(parents=True)
    (folder / "objects" / "info" / "alternates").write_bytes(os.fsencode(f"{root / objects}\n"))
    environment = {
        **os.environ, "GIT_INDEX_FILE": str(folder / "index"), "GIT_OBJECT_DIRECTORY": str(folder / "objects"),
    }  # fmt: skip

    def git(*arguments: str, given: str = "") -> None:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            env=environment, input=given.encode(errors="surrogateescape"), capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:
            stderr = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
            raise CheckFailedError(
                f"commit {code['commit'][:12]} with its recorded changes cannot be written: git {arguments[0]}: {stderr[0]}",
                where=str(target),
                fix="fix that, or `toolkit submit` the job as it is now",
            )

    git("read-tree", "--no-sparse-checkout", code["commit"])
    if "diff" in code:
        git("apply", "--cached", "--whitespace=nowarn", "-", given=code["diff"])
    git("checkout-index", "--all", f"--prefix={target}/")


def call_git(folder: Path, *arguments: str) -> str | None:
    """What git prints about a folder; None where it refuses, is not installed, or does not answer in `ANSWER_S`."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=ANSWER_S, check=False
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    # No text mode, which would take the carriage returns out of a diff.
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else None
