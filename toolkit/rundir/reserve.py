"""Disk space that an attempt reserves at its start, so that a full disk does not hide how it ended."""

from __future__ import annotations

import os
from collections.abc import Mapping

from toolkit.rundir.files import is_unwritable, write_bytes, write_json
from toolkit.rundir.layout import AttemptDirectory

RESERVE_BYTES = 1 << 15  # exit.json with its last lines, the last event, and the start's end.json


def keep_room(attempt: AttemptDirectory) -> None:
    """Write the attempt's reserve: incompressible bytes, since not all file systems can allocate space without a write.

    Raises:
        OSError: there is not enough free space.
    """
    write_bytes(attempt.reserve, os.urandom(RESERVE_BYTES))


def write_exit(attempt: AttemptDirectory, record: Mapping[str, object]) -> None:
    """Write `exit.json`, using the reserve's space if the disk is full.

    Raises:
        OSError: it cannot be written in spite of that.
    """
    try:
        write_json(attempt.exit_file, record)
    except OSError as error:
        if not is_unwritable(error) or not attempt.reserve.exists():
            raise
        attempt.reserve.unlink()
        write_json(attempt.exit_file, record)
    attempt.reserve.unlink(missing_ok=True)
