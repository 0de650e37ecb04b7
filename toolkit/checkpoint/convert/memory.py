"""Is there memory for what an export holds at once? Said before anything is read: the kernel would only kill it."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import OwnFailureError
from toolkit.world.health import memories

ROOT = Path("/")  # where proc and sys are found


def refuse_more_than_is_free(needed_bytes: int, who: str, *, where: str, fix: str) -> None:
    """Refuse what does not fit in the memory that the node, or a limit on this process (its cgroups), leaves.

    Args:
        who: takes the memory, with its verb, such as "torch.save writes".
        fix: the other formats that take less.

    Raises:
        OwnFailureError: naming both sizes.
    """
    for what, free_bytes, _ in memories(ROOT):
        if needed_bytes > free_bytes:
            raise OwnFailureError(
                f"{who} {_gigabytes(needed_bytes)} from memory, and {what} has {_gigabytes(free_bytes)} free",
                where=where,
                fix=f"export with {fix}, or on a host with more memory",
            )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
