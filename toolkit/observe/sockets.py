"""Sockets that only the user can connect to, or that are on loopback."""

import os
import socket
import stat
from pathlib import Path

from toolkit.errors import ToolkitError

__all__ = ["private_folder", "tcp_socket", "unix_socket"]

LONGEST = 107  # bytes in the path of a unix socket, a limit of Linux


def private_folder() -> Path:
    """Return a folder for sockets that only the user can enter; make it if necessary. Paths of runs are often too long."""
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(parent) / "toolkit" if parent and Path(parent).is_dir() else Path(f"/tmp/toolkit-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ToolkitError(
            "expected a folder that only you can enter", where=str(folder), fix="remove it, or use --socket with another path"
        )
    return folder


def unix_socket(path: Path) -> socket.socket:
    """Listen on a unix socket of mode 0600; replace one that no process listens on."""
    if (size := len(os.fsencode(path))) > LONGEST:
        raise ToolkitError(f"expected a path of at most {LONGEST} bytes, got {size}", where=str(path), fix="use a shorter --socket")
    with socket.socket(socket.AF_UNIX) as other:
        if path.is_socket() and not other.connect_ex(str(path)):
            raise ToolkitError("another process listens on this socket", where=str(path), fix="end it, or use another --socket")
    if path.is_socket():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise ToolkitError(f"cannot listen: {error.strerror}", where=str(path), fix="use another --socket") from error
    finally:
        os.umask(before)
    return listener


def tcp_socket(port: int) -> socket.socket:
    """Listen on a port of 127.0.0.1; 0 is any free one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        raise ToolkitError(f"cannot listen: {error.strerror}", where=f"127.0.0.1:{port}", fix="use another --port") from error
    return listener
