"""The one error that means "this checkpoint is damaged", apart from mistakes of its user."""

from __future__ import annotations

from toolkit.errors import CheckFailedError


class CorruptCheckpointError(CheckFailedError):
    """A committed checkpoint is incomplete or its bytes are not those that were saved.

    Loading falls back to an older checkpoint on this error, and on no other.
    """
