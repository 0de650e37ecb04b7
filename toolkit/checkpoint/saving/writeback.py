"""Starts writing a file's pages to the disk while the rest is produced, so that the final sync is short."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import cast

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start, without waiting (sync_file_range(2))


@cache
def _sync_file_range() -> Callable[..., int]:
    function = ctypes.CDLL(None).sync_file_range
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast(Callable[..., int], function)


def begin_writeback(descriptor: int, first_byte: int, size_bytes: int) -> None:
    """Start the writeback. Ignores errors: the sync that follows writes everything and reports errors."""
    _sync_file_range()(descriptor, first_byte, size_bytes, _WRITE)
