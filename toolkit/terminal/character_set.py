"""Which letters a terminal has: all of Unicode, or ASCII alone."""

from __future__ import annotations

import os
import sys


def is_plain() -> bool:
    """Whether the user wants no colours (https://no-color.org); a drawing is then plain ASCII, too."""
    return bool(os.environ.get("NO_COLOR"))


def has_unicode() -> bool:
    """Whether stdout takes letters beyond ASCII: its encoding is UTF-8, and not only because the locale is C.

    In a C locale Python turns its UTF-8 mode on by itself (PEP 540), whatever the terminal shows.
    """
    of_locale_c = sys.flags.utf8_mode and not os.environ.get("PYTHONUTF8")
    return "utf" in (sys.stdout.encoding or "").lower() and not of_locale_c
