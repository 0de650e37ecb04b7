"""Messages on stderr. A quoted value, such as a path or a job's name, can never control the user's terminal."""

from __future__ import annotations

import sys
from contextlib import suppress


def plain(text: str) -> str:
    """A name or a one-line message, without characters that would move the cursor or cannot be encoded."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def say(text: str) -> None:
    """Print one line on stderr, with control characters and line ends escaped.

    Raises:
        OSError: stderr cannot be written.
    """
    sys.stderr.write(plain(f"toolkit: {text}") + "\n")
    sys.stderr.flush()


def say_beside(text: str) -> None:
    """Like `say`, but never fail the work that it reports on: stderr may be a log on a full disk."""
    with suppress(OSError):
        say(text)
