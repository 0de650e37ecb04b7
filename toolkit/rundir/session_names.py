"""Where sessions are written down, and under which names."""

from __future__ import annotations

from pathlib import Path

from toolkit.rundir.files import typed_path


def sessions_folder() -> Path:
    """The folder of all sessions, which is made when it is not there."""
    folder = typed_path("~/.toolkit/sessions")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def session_names() -> list[str]:
    """The names of all sessions."""
    return sorted(path.stem for path in sessions_folder().glob("*.json"))
