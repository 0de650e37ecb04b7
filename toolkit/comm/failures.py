"""What a collective that did not finish says: which one, who was there, and who was not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolkit.errors import OwnFailureError

# What gloo, NCCL and the store say when a peer is late, gone or cut off; other errors are passed on as they are.
_TRANSPORT = re.compile(
    r"gloo|NCCL|[Tt]imed? ?out|Connection (closed|reset|refused)|Broken pipe|[Ss]ocket|store", re.ASCII
)


class CollectiveError(OwnFailureError):
    """A collective that did not finish on this rank.

    `sequence` counts the communicator's collectives from 1; 0 is the making of it. All ranks are numbers in the
    world. `missing` are those that had not come to this collective, or of which there is no sign of life;
    `present` are the others.
    """

    def __init__(
        self,
        message: str,
        *,
        where: str,
        fix: str,
        collective: str,
        sequence: int,
        present: Sequence[int],
        missing: Sequence[int],
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.collective = collective
        self.sequence = sequence
        self.present = tuple(present)
        self.missing = tuple(missing)


def is_transport_error(error: BaseException) -> bool:
    """Whether the network or a peer is to blame, not the tensors that were handed in."""
    return isinstance(error, (RuntimeError, OSError)) and bool(_TRANSPORT.search(str(error)))
