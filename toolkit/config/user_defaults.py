"""Read the user's defaults for all jobs, `~/.config/toolkit/config.toml`."""

from collections.abc import Mapping
from pathlib import Path

from toolkit.config.document import Document, dotted, leaves, read_document
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError

__all__ = ["KEYS", "read_user_defaults"]

KEYS = ("job.account", "job.partition", "job.qos", "notify.mail", "notify.mail_on")


def read_user_defaults(environ: Mapping[str, str]) -> Document | None:
    """Return the user's defaults; None without a file.

    Raises:
        ToolkitError: the file sets another key than `KEYS`.
    """
    path = Path(environ.get("HOME", "/nonexistent")) / ".config/toolkit/config.toml"
    if not path.is_file():
        return None
    document = read_document(path)
    for key, _ in leaves(document.values):
        if dotted(key) not in KEYS:
            close = nearest(dotted(key), KEYS) or KEYS
            raise ToolkitError(
                f"{dotted(key)!r} is not a default of the user",
                where=document.place(key),
                fix=f"use {', '.join(close)}",
            )
    return document
