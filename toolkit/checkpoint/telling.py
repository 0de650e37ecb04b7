"""What is worth a line in a rank's log, and no error."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(text: str) -> None:
    """One line on stderr."""
    with suppress(OSError):  # the log may lie on the disk that is full, and what is told must not fail what is done
        sys.stderr.write(f"toolkit: {text}\n")
        sys.stderr.flush()
