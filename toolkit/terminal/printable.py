"""Lines that are safe to print on a terminal."""

from __future__ import annotations

import os
import re
import sys

# ECMA-48: each sequence begins with ESC and a letter, or with the one control character (0x80 to 0x9f) for both.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[@-Z\\-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def clean(line: str) -> str:
    """A log line without terminal escapes and control characters, so that quoting it is safe."""
    return _ESCAPES.sub("", line)


def is_plain() -> bool:
    """Whether the user disabled colors (https://no-color.org); drawings are then plain ASCII as well."""
    return bool(os.environ.get("NO_COLOR"))


def has_unicode() -> bool:
    """Whether stdout accepts characters beyond ASCII: its encoding is UTF-8, and not only because the locale is C.

    In a C locale Python enables its UTF-8 mode (PEP 540), whatever the terminal supports.
    """
    of_locale_c = sys.flags.utf8_mode and not os.environ.get("PYTHONUTF8")
    return "utf" in (sys.stdout.encoding or "").lower() and not of_locale_c
