"""What stands before an attempt begins, what it saves, and what may be loaded whenever it is cut off."""

from __future__ import annotations

from dataclasses import dataclass

from committed_states import Name

from toolkit.checkpoint.format.filters import Compression


@dataclass(frozen=True)
class Story:
    """What stands before attempt 1 begins, what it saves, and which states may be loaded, from the earliest on.

    A state of `older` may be loaded as long as no save has returned. A `leftover` is a part of an attempt before, which is
    deleted first: each deletion has a thread of its own, and a fault would befall that one and no later one.
    """

    before: tuple[int, ...]
    steps: tuple[int, ...]
    older: tuple[Name, ...]
    leftover: bool = False
    in_background: bool = False
    compression: Compression = "none"

    @property
    def loadable(self) -> list[Name]:
        return [*self.older, *((step, 1) for step in self.steps)]


STORIES = {
    "first steps": Story((), (1, 2), ()),
    "new steps": Story((1, 2), (3, 4), ((2, 0),)),
    "new steps in the background": Story((1, 2), (3, 4), ((2, 0),), in_background=True),
    # HDF5 writes these, in places that follow from what came before; zlib is there wherever Python is.
    "new steps, compressed": Story((1, 2), (3, 4), ((2, 0),), compression="gzip"),
    "same step": Story((1, 3), (3, 4), ((3, 0),)),
    "back to an earlier step": Story((1, 5), (3, 4), ((1, 0), (5, 0)), leftover=True),
}
