"""Is there a file to read? Asked before anything is begun with it."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.errors import NotFoundError, ToolkitError


def check_readable(path: Path, fix: str) -> None:
    """Refuse what is not a file, or may not be read; reading a pipe would never end.

    Raises:
        NotFoundError: there is none.
        ToolkitError: it is something else, or is closed to this user.
    """
    try:
        found = path.is_file()
    except OSError as error:
        raise ToolkitError(f"cannot read it: {error.strerror}", where=str(path), fix=fix) from error
    if not found:
        if path.exists():
            raise ToolkitError("is not a file", where=str(path), fix=fix)
        raise NotFoundError("there is no such file", where=str(path), fix=fix)
    if not os.access(path, os.R_OK):
        raise ToolkitError("may not be read by this user", where=str(path), fix=f"chmod +r {path}")
