"""Copy the job folder at submission, so that later edits do not affect a waiting run.

The copy has the files that git tracks or would add; without a repository, all files. Everything else, such as data,
environments and outputs of earlier runs, is a link, so that relative paths remain valid.
"""

import fnmatch
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from toolkit.config.entry import files_of_entry
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import CheckFailedError, ToolkitError
from toolkit.rundir.files import make_folder, mode_of_files_in, private_mode, read_json_or_none, write_json
from toolkit.terminal.talk import say

__all__ = [
    "Snapshot", "check_out", "code_state", "differences", "list_of", "read_snapshot", "remove_snapshot",
    "repeat_snapshot", "take_snapshot",
]  # fmt: skip

MOST_FILES = 5000  # copies and links; creating them takes a second on a slow file system
MOST_BYTES = 100 * 2**20
LARGEST_FILE_BYTES = 10 * 2**20  # code files are smaller; larger files are data, which is linked
COPIERS = 8  # threads; a network file system handles several copies at once
_NEVER = frozenset({".git", ".hg", ".svn", "__pycache__"})
# Files that identify an environment, a cache, or a run, rather than code.
_MARKS = ("pyvenv.cfg", "CACHEDIR.TAG", "record.json")
# Outputs of earlier runs, unless a folder is a package of Python or a file is its source.
_OUTPUT_FOLDERS = ("checkpoint-*", "lightning_logs", "wandb")
_OUTPUT_FILES = ("checkpoint-*", "*.ckpt")
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_MOST_ENTRIES = 50  # of a folder, to find out whether it holds runs


@dataclass(frozen=True)
class CodeFile:
    """A copied file; for a link within the folder, `sha256` is the digest of its target."""

    sha256: str
    bytes: int
    executable: bool


@dataclass(frozen=True)
class Snapshot:
    """The copied files by path, and the links, both relative to the folder."""

    source: Path
    files: Mapping[str, CodeFile]
    linked: Sequence[str]

    @property
    def digest(self) -> str:
        """The digest of all copied files together."""
        known = {name: (file.sha256, file.executable) for name, file in sorted(self.files.items())}
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def summary(self, folder: str) -> dict[str, Any]:
        """Return the entry for `record.json`."""
        size = sum(file.bytes for file in self.files.values())
        return {"folder": folder, "files": len(self.files), "bytes": size, "digest": self.digest}


class _TooLargeError(Exception):
    """The folder exceeds the limits of a snapshot."""


def take_snapshot(job: ResolvedJob, target: Path, runs: Path) -> Snapshot | str:
    """Copy the code of `job` to the new folder `target` of a run; return the snapshot, or why there is none.

    With `snapshot = "auto"`, there is none if the entry names no file in the job folder.

    Raises:
        ToolkitError: the job requires a copy, but the folder is too large; or a file cannot be read or written.
    """
    wanted = job.job.snapshot
    entry = files_of_entry(job)
    if wanted == "none" or (wanted == "auto" and not entry):
        return "not asked for" if wanted == "none" else "the entry names no file of the job's folder"
    folder, outputs = job.job_directory, set[PurePosixPath]()
    try:
        secret = _secret_files(job)
        names = [name for name in _names(folder, runs, entry, outputs) if _real(folder / name) not in secret]
        written = {name for name in names if _is_output_file(name) or _is_progress(job, name)} - {*entry}
        copied, linked = _sorted_out(folder, names, runs, entry, outputs, written)
    except _TooLargeError as error:
        message = f"{folder} {error}: too large for a snapshot"
        where = job.origin("job.snapshot").place("job.snapshot")
        if wanted == "copy":
            raise ToolkitError(message, where=where, fix=_FIX) from None
        say(f"{message}; the ranks will run the code that is in the folder when they start. Fix: {_FIX}")
        return str(error)
    return _keep(_write(folder, target, copied, linked), target)


_FIX = 'move data out of it, list the data in .gitignore, or set snapshot = "none" in [job]'


def _secret_files(job: ResolvedJob) -> set[Path]:
    """Return the files of secrets in [env] and [notify], which are linked, so that no copy contains a secret."""
    places = [*job.env.secrets.values(), *job.notify.references.values()]
    paths = [one.removeprefix("file:") for one in places if one.startswith("file:")]
    return {_real(job.job_directory / Path(path).expanduser()) for path in paths}


def _is_progress(job: ResolvedJob, name: str) -> bool:
    """Return whether `restart.progress` matches a file, from the current folder, where ranks start, or the job's folder."""
    if not job.restart.progress:
        return False
    path, pattern = job.job_directory / name, Path(job.restart.progress).expanduser().parts
    return any(_fits(Path(one).parts, pattern) for one in (name, path, os.path.relpath(path)))


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Compare a path with a pattern as `glob` does, without reading folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[count:], pattern[1:]) for count in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def list_of(folder: Path) -> Path:
    """Return the path of a snapshot's file list, which is next to the snapshot."""
    return folder.with_name(f"{folder.name}.json")


def read_snapshot(folder: Path) -> Snapshot | None:
    """Return the snapshot in a run's folder, or None."""
    message = read_json_or_none(list_of(folder))
    if message is None:
        return None
    files = {
        name: CodeFile(file["sha256"], file["bytes"], file["executable"]) for name, file in message["files"].items()
    }
    return Snapshot(Path(message["source"]), files, message["linked"])


def repeat_snapshot(source: Path, target: Path) -> Snapshot:
    """Copy a run's snapshot to another run.

    Raises:
        CheckFailedError: a file of it has changed since it was taken.
    """
    snapshot = read_snapshot(source)
    assert snapshot is not None
    names = [name for name in snapshot.files if (source / name).is_file()]
    links = {name: str(snapshot.source / name) for name in snapshot.linked}
    copied = _write(source, target, names, links).files
    altered = sorted(name for name, file in snapshot.files.items() if copied.get(name) != file)
    if altered:
        raise CheckFailedError(
            f"changed since the submission: {', '.join(altered[:3])}{' and more' if altered[3:] else ''}",
            where=str(source),
            fix="restore these files, or `toolkit submit` the job as it is now",
        )
    return _keep(snapshot, target)


def differences(before: Snapshot, after: Snapshot) -> dict[str, str]:
    """Return files that differ between two snapshots, each `changed`, `added` or `removed` relative to `before`.

    A file that one of them links is an output: older versions copied these.
    """
    found, linked = {}, {*before.linked, *after.linked}
    for name in sorted({*before.files, *after.files}):
        if not linked.isdisjoint((name, *map(str, PurePosixPath(name).parents))):
            continue
        if name not in before.files:
            found[name] = "added"
        elif name not in after.files:
            found[name] = "removed"
        elif before.files[name] != after.files[name]:
            found[name] = "changed"
    return found


def remove_snapshot(folder: Path) -> None:
    """Remove a snapshot that no start will use."""
    list_of(folder).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _names(folder: Path, runs: Path, entry: Sequence[str], outputs: set[PurePosixPath]) -> list[str]:
    """Return the files to copy, relative to the folder; always those of the entry, even if git ignores them.

    Adds the folders of outputs to `outputs`.
    """
    listed = new_and_tracked_files(folder, leave_out=runs)
    names = _walk(folder, runs, outputs) if listed is None else _code_among(listed, folder, runs, outputs)
    return list(dict.fromkeys([*entry, *names]))


def _code_among(listed: Sequence[str], folder: Path, runs: Path, outputs: set[PurePosixPath]) -> Iterator[str]:
    """Return git's list without the files of runs, outputs, environments and caches that git does not ignore."""
    known: dict[PurePosixPath, bool] = {PurePosixPath(): False}

    def is_left_out(inside: PurePosixPath) -> bool:
        if inside not in known:
            known[inside] = is_left_out(inside.parent) or _is_no_code(folder / inside, runs)
            if not known[inside] and _is_output_folder(folder / inside):
                known[inside] = True
                outputs.add(inside)
        return known[inside]

    def is_code(path: PurePosixPath) -> bool:
        return not is_left_out(path.parent) or (_is_source(path) and not outputs.isdisjoint(path.parents))

    return (name for name in listed if is_code(PurePosixPath(name)))


def _walk(folder: Path, runs: Path, outputs: set[PurePosixPath]) -> Iterator[str]:
    """Yield every file below a folder without a repository, except environments, caches, runs, outputs and hidden folders."""
    seen = 0
    for place, folders, files in os.walk(folder):
        inside = PurePosixPath(Path(place).relative_to(folder))
        folders[:] = [name for name in sorted(folders) if name[0] != "." and not _is_no_code(Path(place, name), runs)]
        if is_output := not outputs.isdisjoint((inside, *inside.parents)):
            folders[:] = [name for name in folders if not _RUN_ID.fullmatch(name)]
        else:
            outputs |= {inside / name for name in folders if _is_output_folder(Path(place, name))}
        found = [inside / name for name in sorted(files) if not is_output or _is_source(inside / name)]
        seen += len(found)
        if seen > MOST_FILES:
            raise _TooLargeError(f"has more than {MOST_FILES} files")
        yield from map(str, found)


def _is_source(path: PurePosixPath) -> bool:
    """Return whether a file in a folder of outputs is code: a source of Python, but no copy in a run."""
    return path.suffix == ".py" and not any(map(_RUN_ID.fullmatch, path.parts))


def _is_no_code(folder: Path, runs: Path) -> bool:
    return folder == runs or folder.name in _NEVER or any((folder / mark).exists() for mark in _MARKS)


def _is_output_folder(folder: Path) -> bool:
    """Return whether a folder contains the outputs of earlier runs: by its name, or because it holds runs of toolkit."""
    if any(fnmatch.fnmatchcase(folder.name, pattern) for pattern in _OUTPUT_FOLDERS):
        return not (folder / "__init__.py").exists()
    inside = _first_entries(folder)
    if any(_is_run(one) for one in inside):
        return True
    jobs = [one for one in inside if one.name[0] != "."]  # of RUNS
    return bool(jobs) and all(one.is_dir() and any(map(_is_run, _first_entries(one))) for one in jobs)


def _first_entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [*islice(entries, _MOST_ENTRIES)]
    return []


def _is_run(entry: os.DirEntry[str]) -> bool:
    return bool(_RUN_ID.fullmatch(entry.name)) and entry.is_dir()


def _is_output_file(name: str) -> bool:
    base = PurePosixPath(name)
    return base.suffix != ".py" and any(fnmatch.fnmatchcase(base.name, pattern) for pattern in _OUTPUT_FILES)


def _sorted_out(
    folder: Path, names: Sequence[str], runs: Path, entry: Sequence[str], outputs: set[PurePosixPath], written: set[str]
) -> tuple[list[str], dict[str, str]]:  # fmt: skip
    """Return (files to copy, targets of links). Files of the entry are copied regardless of their size.

    `outputs` and `written` files are links, but not the folders that contain them: what the job adds there stays in its copy.
    """
    copied, size = [], 0
    for name in names:
        path = folder / name
        if path.is_file() and (name in entry or path.stat().st_size <= LARGEST_FILE_BYTES):
            if name in written:
                outputs.add(PurePosixPath(name))
                continue
            copied.append(name)
            size += path.stat().st_size
    if size > MOST_BYTES:
        raise _TooLargeError(f"has {size / 2**20:.0f} MiB of files, more than {MOST_BYTES // 2**20}")
    made = {PurePosixPath(name) for name in copied}
    folders = {PurePosixPath(), *(parent for name in made | outputs for parent in name.parents)}
    linked = {}
    for inside in sorted(folders):
        for found in os.scandir(folder / inside):
            beside = inside / found.name
            if found.name in _NEVER or beside in made or beside in folders or Path(found.path) == runs:
                continue
            linked[str(beside)] = found.path
    if len(copied) + len(linked) > MOST_FILES:
        raise _TooLargeError(f"has {len(copied) + len(linked)} files, more than {MOST_FILES}")
    return copied, linked


def _write(folder: Path, target: Path, names: Sequence[str], linked: Mapping[str, str]) -> Snapshot:
    """Copy the files and create the links."""
    make_folder(target)
    target.chmod(stat.S_IMODE(target.stat().st_mode) & private_mode(folder))
    for inside in sorted({parent for name in [*names, *linked] for parent in PurePosixPath(name).parents[:-1]}):
        (target / inside).mkdir()
        mode = stat.S_IMODE(target.stat().st_mode)
        (target / inside).chmod(mode & private_mode(folder / inside) | 0o700)  # mkdir applies the umask
    mode = mode_of_files_in(target)

    def copy(name: str) -> CodeFile | None:
        source = folder / name
        try:
            data, executable = source.read_bytes(), os.access(source, os.X_OK)
        except FileNotFoundError:  # the file was removed after it was listed
            return None
        (target / name).touch(mode=0o600)  # never readable by others, whatever the umask
        (target / name).write_bytes(data)
        (target / name).chmod(mode & private_mode(source) | (0o700 if executable else 0o600))
        return CodeFile(hashlib.sha256(data).hexdigest(), len(data), executable)

    with ThreadPoolExecutor(COPIERS) as pool:
        files = {name: file for name, file in zip(names, pool.map(copy, names), strict=True) if file is not None}
    for name, leads_to in linked.items():
        (target / name).symlink_to(leads_to)
    _turn_inward(folder, target, [*files, *linked])
    return Snapshot(folder, files, sorted(linked))


def _turn_inward(folder: Path, target: Path, names: Iterable[str]) -> None:
    """Redirect links that point into the folder to the copies of their targets, if these exist."""
    for name in names:
        link, copy = folder / name, target / name
        if link.is_symlink() and _leads_inside(link, folder) and (copy.parent / link.readlink()).exists():
            copy.unlink()
            copy.symlink_to(link.readlink())


def _keep(snapshot: Snapshot, target: Path) -> Snapshot:
    """Write the record of a complete snapshot (its source, files and links), and return the snapshot."""
    write_json(list_of(target), {**asdict(snapshot), "source": str(snapshot.source)})
    return snapshot


def _real(path: Path) -> Path:
    """`Path.resolve`, which raises on a link to itself."""
    return Path(os.path.realpath(path))


def _leads_inside(link: Path, folder: Path) -> bool:
    return not link.readlink().is_absolute() and _real(link).is_relative_to(_real(folder))


DIFF_LIMIT_BYTES = 200_000
ANSWER_S = 20.0
# Options for a diff that `git apply` can read, regardless of the user's configuration.
_DIFF = (
    "-c", "diff.relative=false", "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "-U3",
    "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short",
)  # fmt: skip


def new_and_tracked_files(folder: Path, *, leave_out: Path) -> list[str] | None:
    """Return files below `folder` that git tracks or would add, relative to it; None outside a repository."""
    prefix = call_git(folder, "rev-parse", "--show-prefix")
    if prefix is None or call_git(folder, "check-ignore", "--quiet", ".") is not None:
        return None
    arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if leave_out.is_relative_to(folder) and leave_out != folder:  # RUNS may contain thousands of files
        arguments.append(f"--exclude=/{prefix.strip()}{leave_out.relative_to(folder)}/")
    listed = call_git(folder, *arguments)
    return None if listed is None else [name for name in listed.split("\0") if name]


def code_state(folder: Path, *, is_shared: bool = False) -> dict[str, Any]:
    """Return the commit and the uncommitted changes of the git repository of a job; {} without a repository or git.

    `is_shared`: other users may read the record, so that it must not contain changes of a file that only its owner may read.
    """
    commit = call_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    state: dict[str, Any] = {"commit": commit.strip()}
    diff = call_git(folder, *_DIFF)
    if diff is None:  # git did not respond in time
        return state
    state["clean"] = not diff
    size = len(diff.encode(errors="surrogateescape"))
    if size > DIFF_LIMIT_BYTES:
        state["diff_left_out"] = f"{size} bytes, more than {DIFF_LIMIT_BYTES}"
    elif is_shared and (private := _private_change(folder)):
        state["diff_left_out"] = f"only you may read {private}"
    elif diff:
        state["diff"] = diff
    return state


def _private_change(folder: Path) -> str:
    """Return a changed file that only its owner may read; "" if there is none."""
    root = (call_git(folder, "rev-parse", "--show-toplevel") or "").removesuffix("\n")
    changed = call_git(folder, "-c", "diff.relative=false", "diff", "HEAD", "--name-only", "-z") or ""
    found = (name for name in changed.split("\0") if name and Path(root, name).exists())
    return next((name for name in found if private_mode(Path(root, name)) == 0o700), "")


def check_out(folder: Path, code: dict[str, Any], target: Path) -> Path:
    """Check out the recorded state of the repository of `folder` to `target`; return the copy of `folder` in it.

    Files that git did not track at that time are missing.

    Raises:
        CheckFailedError: the commit is gone, its changes were not recorded, or git cannot write them.
    """
    commit, where = code["commit"], str(folder)
    prefix = call_git(folder, "rev-parse", "--show-prefix")
    root = call_git(folder, "rev-parse", "--show-toplevel")
    if prefix is None or root is None or call_git(folder, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise CheckFailedError(
            f"the repository lacks commit {commit[:12]} of the run",
            where=where,
            fix=f"`git -C {folder} fetch origin {commit}`",
        )
    _check_kept(code, where)
    make_folder(target)
    source = Path(root.removesuffix("\n"))
    with TemporaryDirectory(prefix="toolkit-") as folder_of_index:
        _write_state(source, code, target, Path(folder_of_index))
    for path in (path for path in target.rglob("*") if not path.is_symlink()):
        if (original := source / path.relative_to(target)).exists():  # git does not record who may read a file
            path.chmod(stat.S_IMODE(path.stat().st_mode) & private_mode(original))
    return target / prefix.removesuffix("\n")


def _check_kept(code: dict[str, Any], where: str) -> None:
    """Reject a record without the uncommitted changes, because different code would run."""
    if "diff" in code or code.get("clean"):
        return
    why = code.get("diff_left_out", f"git did not respond within {ANSWER_S:.0f} s")
    raise CheckFailedError(
        f"the uncommitted changes to commit {code['commit'][:12]} were not recorded ({why})",
        where=where,
        fix='commit the changes, and `toolkit submit` again; [job] snapshot = "copy" always keeps a copy of the files',
    )


def _write_state(root: Path, code: dict[str, Any], target: Path, folder: Path) -> None:
    """Apply the commit and its changes to a temporary index in `folder`, and write its files to `target`."""
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
                f"cannot restore commit {code['commit'][:12]} with its recorded changes: git {arguments[0]}: {stderr[0]}",
                where=str(target),
                fix="fix this git error, or `toolkit submit` the job as it is now",
            )

    git("read-tree", "--no-sparse-checkout", code["commit"])
    if "diff" in code:
        git("apply", "--cached", "--whitespace=nowarn", "-", given=code["diff"])
    git("checkout-index", "--all", f"--prefix={target}/")


def call_git(folder: Path, *arguments: str) -> str | None:
    """Return git's output for a folder; None if it refuses, is not installed, or exceeds `ANSWER_S`."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=ANSWER_S, check=False
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    # Text mode would remove carriage returns from a diff.
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else None
