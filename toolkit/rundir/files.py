"""Small durable files: written whole or not at all, appended a line at a time."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.errors import DamagedFileError, ToolkitError
from toolkit.rundir.records import check_record


def utc_now() -> str:
    """The present as ISO 8601 in UTC with milliseconds, for records."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def is_unwritable(error: OSError) -> bool:
    """True where the file system takes nothing: it is full, its quota is used up, or it can only be read."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def cannot_write(error: OSError, *, what: str = "cannot write", where: Path | None = None) -> ToolkitError:
    """The system's refusal to write below RUNS, in words. `where` counts where the error itself names no file."""
    no_room = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ToolkitError(
        f"{what}: {error.strerror}",
        where=str(error.filename or where or ""),
        fix=("make room there, or give another folder" if no_room else "give a folder you can write to")
        + " with --runs or TOOLKIT_RUNS",
    )


def not_permitted(error: PermissionError) -> ToolkitError:
    """A file or folder that the system denies, with who can fix it."""
    path = Path(str(error.filename or ""))
    for place in (path, *path.parents):
        try:
            owner = place.stat().st_uid
        except OSError:  # it is not there, or the folder around it says nothing: that one refuses
            continue
        break
    else:
        place, owner = path, os.getuid()
    mine = owner == os.getuid()
    fix = (
        f"`chmod u+rwX {shlex.quote(str(place))}`" if mine else f"ask {_name_of(owner)}, whose it is, for access to it"
    )
    return ToolkitError(error.strerror or "Permission denied", where=str(path), fix=fix)


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


@contextmanager
def permissions_in_words() -> Iterator[None]:
    """For what reads the files of several runs, some maybe of other users.

    Raises:
        ToolkitError: in place of a PermissionError.
    """
    try:
        yield
    except PermissionError as error:
        raise not_permitted(error) from error


def make_folder(path: Path) -> None:
    """Make a folder as open as the one around it, and bring its name to the disk; the umask does not decide who can read.

    Raises:
        FileExistsError: it is there already.
    """
    path.mkdir(mode=0o700)
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode))
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file's bytes, or the names in a folder, to the disk: a power cut may take whatever has no name there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mode_of_files_in(folder: Path) -> int:
    """As open as the folder: 0600 in one of 0700, 0640 in one of 0750; where the umask made the folder, as the umask."""
    return stat.S_IMODE(folder.stat().st_mode) & 0o666 | 0o600


def _file_mode(path: Path) -> int:
    """0600 in a folder of 0700, 0640 in one that the group may read."""
    return mode_of_files_in(path.parent) & 0o640


def write_text(path: Path, text: str, *, mode: int | None = None, durable: bool = True) -> None:
    """Write `text` as `write_bytes` does."""
    # A byte that is not UTF-8, as a folder's name may hold, becomes the escape that JSON has for it.
    write_bytes(path, text.encode("utf-8", "backslashreplace"), mode=mode, durable=durable)


def write_bytes(path: Path, data: bytes, *, mode: int | None = None, durable: bool = True) -> None:
    """Write `data` so that a reader sees the old file or the new one, never a part.

    `mode` is the file's, by default as open as its folder but for the group to write. `durable` waits for the
    disk; a heartbeat need not.
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
        temporary.unlink(missing_ok=True)  # a full disk must not fill up with parts
        if isinstance(error, OSError):
            error.filename = str(path)  # a write's own error names no file
        raise


def write_json(path: Path, value: Any, *, mode: int | None = None, durable: bool = True) -> None:
    """Write `value` as one JSON document, atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", mode=mode, durable=durable)


def read_json(path: Path) -> Any:
    """Read one JSON document; a damaged one is an error that names the file, also where keys are missing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(
            f"not valid JSON: {error}", where=str(path), fix="restore the file or start a new run"
        ) from error
    except IsADirectoryError as error:
        raise _is_a_folder(path) from error
    check_record(value, str(path))
    return value


def _is_a_folder(path: Path) -> ToolkitError:
    return DamagedFileError(
        "is a folder and should be a file", where=str(path), fix="restore the file or start a new run"
    )


def read_json_or_none(path: Path) -> Any | None:
    """As `read_json`, None when there is no such file."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return None


def open_append(path: Path) -> int:
    """A file descriptor that appends to `path`, which is as open as its folder."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.fchmod(descriptor, _file_mode(path))
    return descriptor


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line, or nothing. Only the file's one writer calls this: appends are not atomic over NFS."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    with os.fdopen(open_append(path), "ab", buffering=0) as stream:
        before = os.fstat(stream.fileno()).st_size
        try:
            written = stream.write(line.encode())
            if written != len(line.encode()):  # the disk was full in the middle of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            stream.truncate(before)  # the next line would follow half of this one
            raise


def why_unwritable(folder: Path, size_bytes: int = 1) -> str:
    """Why `size_bytes` more cannot be written below a folder; "" where they can. Only writing tells of a quota."""
    trial = folder / f".room-{os.uname().nodename}"
    try:
        write_bytes(trial, bytes(size_bytes))
        trial.unlink()
    except OSError as error:
        return str(error.strerror) if is_unwritable(error) else ""
    return ""


def json_reason(error: Exception) -> str:
    """Why one line is not a valid record. json counts lines of its input, which is this line only."""
    return f"{error.msg}: column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file. An unfinished last line is not a record yet and is omitted.

    Raises:
        ToolkitError: a line within the file is damaged; its number is named.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except IsADirectoryError as error:
        raise _is_a_folder(path) from error
    # Not splitlines(): that would also break at U+2028 and U+0085, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ToolkitError(
                    f"not valid JSON: {json_reason(error)}", where=f"{path}:{number}", fix="remove that line"
                ) from error
            check_record(value, f"{path}:{number}")
            yield value


def tail_text(path: Path, lines: int, *, limit_bytes: int = 65536) -> list[str]:
    """The last `lines` lines of a file, reading at most `limit_bytes` from its end; [] when it is missing."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit_bytes))
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-lines:]
