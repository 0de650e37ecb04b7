"""What is said on stderr. A value that it quotes, such as a path or a job's name, never rules the reader's terminal."""

from __future__ import annotations

import sys
from contextlib import suppress


def plain(text: str) -> str:
    """A name or a message of one line, without what would move the cursor or cannot be encoded."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def say(text: str) -> None:
    """One line on stderr; what a value brought along of control characters and line ends is escaped.

    Raises:
        OSError: stderr takes no more.
    """
    sys.stderr.write(plain(f"toolkit: {text}") + "\n")
    sys.stderr.flush()


def say_beside(text: str) -> None:
    """As `say`, beside work that must not fail by it: stderr may be a log on the disk that is full."""
    with suppress(OSError):
        say(text)
