"""Describes in one line how a checkpoint differs from the state that it is loaded into."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMED = 10  # of each kind: a model that is twice as wide differs in every tensor, and a model may have thousands

Shape = Sequence[int] | None  # None for a value other than a tensor


def difference(lacking: Sequence[str] = (), extra: Sequence[str] = (), shapes: Sequence[str] = ()) -> str:
    """Keys that a checkpoint lacks, has in excess, or has in other shapes (of `both_shapes`); "" if there are none."""
    differences = []
    if lacking:
        differences.append(f"lacks {_named(lacking)}")
    if extra:
        differences.append(f"contains {_named(extra)}, which this job does not have")
    if shapes:
        differences.append(f"has other shapes: {_named(shapes)}")
    return "; ".join(differences)


def both_shapes(name: str, there: Shape, here: Shape) -> str:
    """A tensor with different shapes in the checkpoint and in memory: `head.bias ([3] there, [5] here)`."""
    return f"{name} ({_shape(there)} there, {_shape(here)} here)"


def _shape(shape: Shape) -> str:
    return "no tensor" if shape is None else str(list(shape))


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
