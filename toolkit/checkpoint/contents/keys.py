"""Keys of tensors for people: chosen by patterns, and in an order in which layer 10 follows layer 9."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from toolkit.errors import NotFoundError

_NUMBER = re.compile(r"(\d+)")


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether a key matches a pattern (`*.weight`), or is below one (`model.blocks`); always true without patterns."""
    return not patterns or any(
        key == pattern or key.startswith(f"{pattern}.") or fnmatchcase(key, pattern) for pattern in patterns
    )


def refuse_unknown(patterns: Sequence[str], keys: Collection[str]) -> None:
    """Refuse a pattern without matches, which is a typing error, instead of reporting a good result.

    Raises:
        NotFoundError: names the first such pattern.
    """
    for pattern in patterns:
        if not any(matches(key, [pattern]) for key in keys):
            known = ", ".join(sorted({key.partition(".")[0] for key in keys}))
            raise NotFoundError(f"no key matches {pattern!r}", where="--only", fix=f"keys start with: {known}")


def in_order(key: str) -> list[tuple[int, int, str]]:
    """A sort key for natural order: numbers in a key compare as numbers."""
    parts = _NUMBER.split(key)
    return [(1, int(part), "") if index % 2 and len(part) < 20 else (0, 0, part) for index, part in enumerate(parts)]
