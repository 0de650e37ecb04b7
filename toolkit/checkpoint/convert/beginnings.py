"""Whose file it is, by its first bytes: a name may lie, and many a file has none that tells."""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<Q")  # of the header that follows, in a safetensors file
ZIP = b"PK\x03\x04"  # of torch.save
BEFORE_TORCH_1_6 = bytes.fromhex("6cfc9c46f9206aa85019")  # torch's magic number as a pickle holds it


def format_of_beginning(size: int, start: bytes) -> str | None:
    """The format that the first bytes of a file of `size` bytes tell; None where they tell none."""
    if start.startswith(ZIP) or BEFORE_TORCH_1_6 in start:
        return "torch"
    if start[LENGTH.size : LENGTH.size + 1] == b"{" and LENGTH.unpack_from(start)[0] <= size - LENGTH.size:
        return "safetensors"
    return None
