"""Sockets on which commands of one user listen: unix sockets that no other user can open, and TCP ports."""

import os
import socket
import stat
from pathlib import Path

from toolkit.errors import ToolkitError

__all__ = ["listen", "private_folder"]


def private_folder() -> Path:
    """Return a folder for sockets that only the user can enter; paths of runs are often too long."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent") / "toolkit"
    folder = folder if folder.parent.is_dir() else Path(f"/tmp/toolkit-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ToolkitError(
            "expected a folder that only you can enter", where=str(folder), fix="remove it, or use --socket"
        )
    return folder


def listen(address: Path | tuple[str, int]) -> socket.socket:
    """Return a socket that listens on a path, with mode 0600, or on a host and port; 0 is any free port."""
    listener = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET)
    mask = os.umask(0o177)
    try:
        if not isinstance(address, Path):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        elif address.is_socket() and listener.connect_ex(str(address)):
            address.unlink()  # no process listens on it
        listener.bind(str(address) if isinstance(address, Path) else address)
        listener.listen()
    except OSError as error:
        listener.close()
        where = str(address) if isinstance(address, Path) else f"{address[0]}:{address[1]}"
        fix = "create the folder" if isinstance(error, FileNotFoundError) else "use another address or --socket"
        raise ToolkitError(f"cannot listen: {error.strerror or error}", where=where, fix=fix) from error
    finally:
        os.umask(mask)
    return listener
