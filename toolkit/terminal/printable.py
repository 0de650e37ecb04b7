"""Lines that are safe to print on a terminal."""

from __future__ import annotations

import re

# ECMA-48: each sequence begins with ESC and a letter, or with the one control character (0x80 to 0x9f) for both.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[@-Z\\-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def clean(line: str) -> str:
    """A log line without terminal escapes and control characters, so that quoting it is safe."""
    return _ESCAPES.sub("", line)
