"""Read the user's defaults for all jobs, `~/.config/toolkit/config.toml`."""

from collections.abc import Mapping
from pathlib import Path

from toolkit.config.document import Document, dotted, leaves, read_document
from toolkit.errors import ToolkitError

__all__ = ["read_user_defaults"]

_KEYS = ("job.account", "job.partition", "job.qos", "notify.mail", "notify.mail_on")


def read_user_defaults(environ: Mapping[str, str]) -> Document | None:
    """Return the user's defaults; None without a file. ToolkitError if the file sets a key that has no default."""
    path = Path(environ.get("HOME", "/nonexistent")) / ".config/toolkit/config.toml"
    if not path.is_file():
        return None
    document = read_document(path)
    for key, _ in leaves(document.values):
        if dotted(key) not in _KEYS:
            message = f"{dotted(key)!r} cannot have a default of the user"
            raise ToolkitError(message, where=document.place(key), fix=f"use {', '.join(_KEYS)}")
    return document
