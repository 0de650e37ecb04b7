"""How a checkpoint and what it is loaded into differ, in one line: every kind of difference, of many names the first."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMED = 10  # of each kind: a model that is twice as wide differs in every tensor, and a model may have thousands

Shape = Sequence[int] | None  # None for a value that is no tensor


def difference(lacking: Sequence[str] = (), extra: Sequence[str] = (), shapes: Sequence[str] = ()) -> str:
    """What a checkpoint lacks, holds for nobody, and holds in other shapes (as of `both_shapes`); "" for nothing."""
    said = []
    if lacking:
        said.append(f"lacks {_named(lacking)}")
    if extra:
        said.append(f"holds {_named(extra)}, for which this job has no place")
    if shapes:
        said.append(f"has other shapes: {_named(shapes)}")
    return "; ".join(said)


def both_shapes(name: str, there: Shape, here: Shape) -> str:
    """One tensor whose shape in the checkpoint is not that in memory: `head.bias ([3] there, [5] here)`."""
    return f"{name} ({_shape(there)} there, {_shape(here)} here)"


def _shape(shape: Shape) -> str:
    return "no tensor" if shape is None else str(list(shape))


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
