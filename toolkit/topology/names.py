"""The order of names with numbers in them."""

from __future__ import annotations

import re


def by_numbers(name: str) -> list[tuple[int, str]]:
    """Sorts node2 before node10, and mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name)]
