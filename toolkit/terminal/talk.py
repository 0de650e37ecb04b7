"""Messages on stderr, lines without control characters, and tables in the style of squeue."""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

__all__ = ["clean", "has_unicode", "is_plain", "plain", "print_table", "say", "say_beside"]


def plain(text: str) -> str:
    """Return a name or one-line message without characters that move the cursor or cannot be encoded."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def say(text: str) -> None:
    """Print one line to stderr, with control characters and line breaks escaped.

    Raises:
        OSError: stderr cannot be written.
    """
    sys.stderr.write(plain(f"toolkit: {text}") + "\n")
    sys.stderr.flush()


def say_beside(text: str) -> None:
    """Like `say`, but without errors: stderr may be a log on a full disk, which must not make the caller fail."""
    with suppress(OSError):
        say(text)


# ECMA-48: each sequence starts with ESC and a character, or with one control character (0x80 to 0x9f) for both.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[@-Z\\-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def clean(line: str) -> str:
    """Return a log line without terminal escapes and control characters, safe to quote."""
    return _ESCAPES.sub("", line)


def is_plain() -> bool:
    """Return whether the user disabled colors (https://no-color.org); bars and tables are then plain ASCII, too."""
    return bool(os.environ.get("NO_COLOR"))


def has_unicode() -> bool:
    """Return whether stdout can print non-ASCII characters: it uses UTF-8, and not only because the locale is C.

    In the C locale, Python enables its UTF-8 mode (PEP 540) even if the terminal does not support it.
    """
    of_locale_c = sys.flags.utf8_mode and not os.environ.get("PYTHONUTF8")
    return "utf" in (sys.stdout.encoding or "").lower() and not of_locale_c


_BETWEEN = "  "
_LEAST_LAST = 12  # minimum width of the last column, which may have long strings


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, shed: Sequence[str] = ()) -> None:
    """Print a line for each row, with each column as wide as its widest value.

    On a terminal that is too narrow, columns in `shed` are omitted in that order, and longer lines are cut. A file or a
    pipe gets every column. rich is not used, since it renders about 1,000 rows per second, and a history may have
    hundreds of thousands.
    """
    table = [header, *([clean(str(cell).replace("\n", " ")) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    edge = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    kept = list(range(len(header))) if edge is None else _kept(header, widths, edge, shed)
    cut = "…" if has_unicode() else "~"
    for row in table:
        line = _BETWEEN.join(row[place].ljust(widths[place]) for place in kept).rstrip()
        sys.stdout.write((line if edge is None or len(line) <= edge else f"{line[: edge - 1]}{cut}") + "\n")
    sys.stdout.flush()  # a full disk must make this command fail


def _kept(header: Sequence[str], widths: Sequence[int], edge: int, shed: Sequence[str]) -> list[int]:
    """Return the indexes of the columns that fit into `edge` characters; the last one may be truncated."""
    least = [*widths[:-1], min(widths[-1], _LEAST_LAST)]
    kept = list(range(len(header)))
    for title in shed:
        if sum(least[place] + len(_BETWEEN) for place in kept) - len(_BETWEEN) <= edge:
            break
        kept.remove(header.index(title))
    return kept
