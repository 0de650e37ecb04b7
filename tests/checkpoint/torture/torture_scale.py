"""How many cases the torture of checkpoints runs: a sample, or with TOOLKIT_CHECKPOINT_TORTURE=full all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

SCALE = os.environ.get("TOOLKIT_CHECKPOINT_TORTURE", "sample")
if SCALE not in ("sample", "full"):
    raise ValueError(f"TOOLKIT_CHECKPOINT_TORTURE is {SCALE!r}: say sample or full")
FULL = SCALE == "full"

T = TypeVar("T")


def cases(full: int, sample: int) -> int:
    """How many cases this session runs."""
    return full if FULL else sample


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, from the first to the last at equal distances."""
    if len(items) <= count:
        return list(items)
    return [items[number * (len(items) - 1) // max(count - 1, 1)] for number in range(count)]
