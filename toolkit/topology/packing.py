"""Pack units of a cluster into groups of a given size so that few groups cross a tier.

The algorithm goes from the finest tier to the coarsest. In each tier it joins units of the same tier group, in their
order, into full groups, and passes the remaining units to the next tier. A clique of 7 units thus becomes one group of
4, and its node gets 3 units.
"""

from __future__ import annotations

import numpy as np

__all__ = ["NOWHERE", "pack"]

NOWHERE = -1  # the tier group of a unit whose members are in several groups of that tier


def pack(places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Join units into groups of `size`.

    Args:
        places: (tiers, units), the group of each unit in each tier, or `NOWHERE` if the unit crosses groups. The finest
            tier is first; all units are in one group of the last tier.
        size: units in each group; it divides the number of units.

    Returns:
        The unit numbers of each group, (groups, size), ordered by first unit; and the places of the groups in the form
        of `places`, (tiers, groups).
    """
    tiers, units = places.shape
    assert units % size == 0, (units, size)
    rest = np.arange(units)
    packed: list[np.ndarray] = []
    for tier in range(tiers):
        joined, rest = _join(rest, places[: tier + 1], size)
        packed.append(joined)
    groups = np.concatenate(packed)
    groups = groups[np.argsort(groups[:, 0], kind="stable")]
    member_places = places[:, groups]
    is_same = (member_places == member_places[:, :, :1]).all(axis=2)
    return groups, np.where(is_same, member_places[:, :, 0], NOWHERE)


def _join(units: np.ndarray, places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(full groups of units that share a group of the last of these tiers, remaining units)."""
    # Finer tiers order the units of a group, so that the units of one clique stay together.
    order = np.lexsort((units, *(places[tier, units] for tier in range(len(places)))))
    ordered = units[order]
    labels = places[-1, ordered]
    starts = np.flatnonzero(np.r_[True, labels[1:] != labels[:-1]]) if len(labels) else np.empty(0, dtype=int)
    counts = np.diff(np.r_[starts, len(labels)])
    index_in_label = np.arange(len(labels)) - np.repeat(starts, counts)
    joinable = np.repeat(np.where(labels[starts] == NOWHERE, 0, counts // size * size), counts)
    is_joined = index_in_label < joinable
    return ordered[is_joined].reshape(-1, size), np.sort(ordered[~is_joined])
