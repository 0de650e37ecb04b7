"""The character set of the terminal: Unicode, or only ASCII."""

from __future__ import annotations

import os
import sys


def is_plain() -> bool:
    """Whether the user disabled colors (https://no-color.org); drawings are then plain ASCII as well."""
    return bool(os.environ.get("NO_COLOR"))


def has_unicode() -> bool:
    """Whether stdout accepts characters beyond ASCII: its encoding is UTF-8, and not only because the locale is C.

    In a C locale Python enables its UTF-8 mode (PEP 540), whatever the terminal supports.
    """
    of_locale_c = sys.flags.utf8_mode and not os.environ.get("PYTHONUTF8")
    return "utf" in (sys.stdout.encoding or "").lower() and not of_locale_c
