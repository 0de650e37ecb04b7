"""Reads and writes small durable files, which are written atomically or appended to one line at a time."""

import errno
import json
import os
import pwd
import re
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from toolkit.errors import DamagedFileError, ToolkitError
from toolkit.rundir.states import Cause, Next, RunState

__all__ = [
    "append_line", "cannot_write", "is_unwritable", "json_reason", "make_folder", "mode_of_files_in",
    "not_permitted", "open_append", "permissions_in_words", "private_mode", "read_json", "read_json_or_none", "read_lines",
    "runs_folder", "sync", "tail_text", "typed_path", "utc_now", "utc_of", "why_full", "why_unwritable", "write_bytes",
    "write_json", "write_text",
]  # fmt: skip


def utc_now() -> str:
    """Return the current time as ISO 8601 in UTC with milliseconds, for records."""
    return utc_of(time.time())


def utc_of(seconds: float) -> str:
    """Return a time in seconds since the epoch in the same form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def is_unwritable(error: OSError) -> bool:
    """Return True if the file system rejects writes: it is full, its quota is reached, or it is read-only."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def cannot_write(error: OSError, *, action: str = "cannot write", where: Path | None = None) -> ToolkitError:
    """Return the error for a failed write below RUNS. `where` is used if the OSError does not name a file."""
    no_space = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ToolkitError(
        f"{action}: {error.strerror}",
        where=str(error.filename or where or ""),
        fix=("free space there, or choose another folder" if no_space else "choose a writable folder")
        + " with --runs or TOOLKIT_RUNS",
    )


def not_permitted(error: PermissionError) -> ToolkitError:
    """Return the error for a file or folder that this user may not access; the fix states who can change that."""
    path = Path(str(error.filename or ""))
    for folder in (path, *path.parents):
        try:
            owner = folder.stat().st_uid
        except OSError:  # the path does not exist, or a parent folder denies access
            continue
        break
    else:
        folder, owner = path, os.getuid()
    is_own = owner == os.getuid()
    fix = f"`chmod u+rwX {shlex.quote(str(folder))}`" if is_own else f"ask its owner {_name_of(owner)} for access"
    return ToolkitError(error.strerror or "Permission denied", where=str(path), fix=fix)


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


@contextmanager
def permissions_in_words() -> Iterator[None]:
    """Convert each PermissionError to a ToolkitError, for code that reads runs of other users."""
    try:
        yield
    except PermissionError as error:
        raise not_permitted(error) from error


def make_folder(path: Path) -> None:
    """Make a folder with the permissions of its parent, independent of the umask, and sync its name to disk.

    Raises:
        FileExistsError: it exists.
    """
    path.mkdir(mode=0o700)
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode))
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync the bytes of a file, or the names in a folder, to disk. Without its name synced, a new file may be lost."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mode_of_files_in(folder: Path) -> int:
    """Return the file mode derived from the mode of a folder: 0600 for 0700, 0640 for 0750, 0644 for 0755."""
    return stat.S_IMODE(folder.stat().st_mode) & 0o666 | 0o600


def _file_mode(path: Path) -> int:
    """Return the mode of a run file: 0640 if the group may read its folder, else 0600."""
    return mode_of_files_in(path.parent) & 0o640


def private_mode(path: Path) -> int:
    """Return the permissions that a copy of a file or folder may have: all, or the owner's if no other user may read it."""
    try:
        return 0o777 if stat.S_IMODE(path.stat().st_mode) & 0o077 else 0o700
    except FileNotFoundError:  # removed meanwhile, so nothing of it is copied
        return 0o700


def write_text(path: Path, text: str, *, mode: int | None = None, durable: bool = True) -> None:
    """Write `text` as UTF-8 with `write_bytes`."""
    # A byte that is not valid UTF-8, as in some folder names, is written as an escape sequence.
    write_bytes(path, text.encode("utf-8", "backslashreplace"), mode=mode, durable=durable)


def write_bytes(path: Path, data: bytes, *, mode: int | None = None, durable: bool = True) -> None:
    """Write `data` atomically: a reader sees the old file or the new one, never a part of it.

    `mode` is the file mode, by default that of the folder without group write access. `durable` waits for the disk,
    which is unnecessary for a heartbeat.
    """
    mode = _file_mode(path) if mode is None else mode
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)  # the umask must not decide who can read
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)  # a full disk must not fill up with partial files
        if isinstance(error, OSError):
            error.filename = str(path)  # errors of write() do not name a file
        raise


def write_json(path: Path, value: Any, *, mode: int | None = None, durable: bool = True) -> None:
    """Write `value` as one JSON document, atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", mode=mode, durable=durable)


def read_json(path: Path) -> Any:
    """Read one JSON document. Raises DamagedFileError if it is not valid JSON or lacks keys of its kind of file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(
            f"invalid JSON: {error}", where=str(path), fix="restore the file or start a new run"
        ) from error
    except IsADirectoryError as error:
        raise _is_a_folder(path) from error
    check_record(value, str(path))
    return value


def _is_a_folder(path: Path) -> ToolkitError:
    return DamagedFileError("expected a file, got a folder", where=str(path), fix="restore the file or start a new run")


def read_json_or_none(path: Path) -> Any | None:
    """Read JSON as `read_json` does, but return None if the file does not exist."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return None


def open_append(path: Path) -> int:
    """Open a file descriptor that appends to `path`, whose permissions are derived from its folder."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.fchmod(descriptor, _file_mode(path))
    return descriptor


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line completely, or nothing. A file may have only one writer: appends over NFS are not atomic."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    with os.fdopen(open_append(path), "ab", buffering=0) as stream:
        before = os.fstat(stream.fileno()).st_size
        try:
            written = stream.write(line.encode())
            if written != len(line.encode()):  # the disk became full during the write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            stream.truncate(before)  # otherwise the next line would follow half of this one
            raise


def why_unwritable(folder: Path, size_bytes: int = 1) -> str:
    """Return why `size_bytes` more cannot be written below a folder, or "". Writes them: only that reveals a quota."""
    trial = folder / f".room-{os.uname().nodename}"
    try:
        write_bytes(trial, bytes(size_bytes))
        trial.unlink()
    except OSError as error:
        return str(error.strerror) if is_unwritable(error) else ""
    return ""


def json_reason(error: Exception) -> str:
    """Return why one line is not valid JSON, without the line number of the json module, which is always 1."""
    return f"{error.msg}: column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file. Skips a last line without a newline, which is still being written.

    Raises:
        ToolkitError: a line is damaged; `where` contains its number.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except IsADirectoryError as error:
        raise _is_a_folder(path) from error
    # splitlines() would also split at U+2028 and U+0085, which may occur inside a JSON string.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ToolkitError(
                    f"invalid JSON: {json_reason(error)}", where=f"{path}:{number}", fix="remove this line"
                ) from error
            check_record(value, f"{path}:{number}")
            yield value


def tail_text(path: Path, lines: int, *, limit_bytes: int = 65536) -> list[str]:
    """Return the last `lines` lines of a file, from at most `limit_bytes` at its end; [] if it does not exist."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit_bytes))
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-lines:]


FULL_BYTES = 1 << 20  # a file system with less free space than this counts as full


def why_full(path: Path) -> str:
    """Return a message if the file system of `path` is nearly full, else "". Quotas are not checked."""
    space = os.statvfs(path)
    left = space.f_bavail * space.f_frsize
    if left >= FULL_BYTES and space.f_favail != 0:
        return ""
    return f"the file system of {path} is full ({left} bytes and {space.f_favail} inodes free)"


def runs_folder(flag: str | Path | None, environ: Mapping[str, str], site_runs: str = "") -> Path:
    """Return the absolute path of RUNS: from `--runs`, else `TOOLKIT_RUNS`, else the site, else `./runs`."""
    chosen = flag or environ.get("TOOLKIT_RUNS") or site_runs or "runs"
    return typed_path(chosen).absolute()


def typed_path(text: str | Path) -> Path:
    """Expand `~` and `~user` in a path that the user typed; `~name` without such a user remains an ordinary name."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  pathlib's version raises an error for an unknown user


_USAGE = {
    "first_rank": int, "ranks": int, "cpu_s": float | int, "cpus_peak": float | int, "memory_peak_bytes": int,
    "memory_mean_bytes": int, "gpus": list | None, "time": str,
}  # fmt: skip
# For each kind of file, a pattern for the end of its path, and its keys with their types (an enum allows its values).
_SHAPES: tuple[tuple[re.Pattern[str], dict[str, Any]], ...] = (
    (re.compile(r"/record\.json"), {"job": dict, "host": str}),
    (re.compile(r"/resumed-\d+\.json"), {"job": dict}),
    (re.compile(r"/code(-\d+)?\.json"), {"source": str, "files": dict, "linked": list[str]}),
    (re.compile(r"/submitted-\d+\.json"), {"job_id": str}),
    (re.compile(r"/sweep\.json"), {"keys": list[str], "tasks": list[dict]}),
    (re.compile(r"/\.bad-nodes/[^/]+/[^/]+\.json"), {"node": str, "reason": str, "run_id": str, "noted": float, "expires": float}),
    (
        re.compile(r"/starts/\d+/claim\.json"),
        {"start": int, "job_id": str, "host": str, "pid": int, "process_started": int},
    ),
    (re.compile(r"/known-[\da-f]{16}\.json"), {"path": str, "parent_inode": str}),
    (re.compile(r"/control/asked-[^/]+\.json"), {"time": str, "request": str, "user": str, "by": str}),
    (re.compile(r"/control/alert-.*"), {"rule": str, "silenced_until_s": float | int, "acknowledged": str, "user": str}),
    (re.compile(r"/starts/\d+/end\.json"), {"state": str, "exit_code": int, "time": str}),
    (re.compile(r"/starts/\d+/job\.json"), {"job": dict}),
    (
        re.compile(r"/attempts/\d+/start\.json"),
        {"start": int, "job_id": str, "nodes": int, "ranks": int, "time": str},
    ),
    (
        re.compile(r"/attempts/\d+/exit\.json"),
        {"cause": Cause, "next": Next, "final": bool, "state": RunState, "exit_code": int, "reason": str, "decision": str,
         "rank": int | None, "host": str | None, "fix": str, "last_lines": list[str], "step": int | None, "time": str},
    ),
    (
        re.compile(r"/attempts/\d+/matched_files\.json"),
        {"pattern": str, "folder": str, **dict.fromkeys(("new", "before", "rewritten", "unchanged"), list[str]),
         "rewritten_count": int, "unchanged_count": int},
    ),
    (re.compile(r"/attempts/\d+/rehearsed\.json"), {"failure": str, "done": str, "time": str}),
    (re.compile(r"/attempts/\d+/heartbeat"), {"step": int}),
    (re.compile(r"/attempts/\d+/mesh\.json"), {"stages": list[int]}),
    (
        re.compile(r"/attempts/\d+/windows/rank-\d+\.json"),
        {"host": str, "time_s": float, "memory": list[dict], "gpus": list[dict], "links": list[dict]},
    ),
    (re.compile(r"/attempts/\d+/usage/rank-\d+\.json"), _USAGE),
    (re.compile(r"/attempts/\d+/events\.jsonl"), {"event": str, "time": str}),
    (re.compile(r"/attempts/\d+/ranks/rank-\d+\.json"), {"rank": int, "host": str, "pid": int}),
    (
        re.compile(r"/attempts/\d+/errors/rank-\d+\.json"),
        {"rank": int, "host": str, "kind": str, "reason": str, "exit_code": int, "time": str},
    ),
)  # fmt: skip
LARGEST = 2**63 - 1


def check_record(value: Any, path: str) -> None:
    """Check the parsed contents of the run file `path`.

    Raises:
        DamagedFileError: they are not valid for this kind of file.
    """
    keys = next((keys for pattern, keys in _SHAPES if pattern.search(path)), None)
    if keys is not None:
        _check(value, keys, path)


def check_kept_usage(value: Any, path: str) -> None:
    """Check the `usage` that was read from `path`, an `exit.json`.

    Raises:
        DamagedFileError: it is not a list of usage records.
    """
    if not isinstance(value, list):
        raise _refusal(path, f"usage = {value!r:.80} is not valid")
    for one in value:
        _check(one, _USAGE, path)


def _check(value: Any, keys: dict[str, Any], path: str) -> None:
    if not isinstance(value, dict):
        raise _refusal(path, "expected a JSON object")
    for name, kind in keys.items():
        if name not in value:
            raise _refusal(path, f"missing key {name!r}")
        if not _fits(value[name], kind):
            raise _refusal(path, f"{name} = {value[name]!r:.80} is not valid")


def _refusal(path: str, problem: str) -> ToolkitError:
    return DamagedFileError(
        f"{problem}: another version of toolkit wrote this file, or it is damaged",
        where=path,
        fix="restore the file or start a new run",
    )


def _fits(value: Any, kind: Any) -> bool:
    if kind in (Cause, Next, RunState):
        return isinstance(value, str) and value in {member.value for member in kind}
    if kind in (list[str], list[int], list[dict]):
        (member,) = get_args(kind)
        return isinstance(value, list) and all(isinstance(one, member) for one in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, int) and abs(value) > LARGEST)
