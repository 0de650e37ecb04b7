"""Packs units of a cluster into groups of a given size so that few groups cross a tier.

From the finest tier to the coarsest: the units that lie in one group of the tier are joined, in their order, as long as
there are enough; what is left over is joined with others of the next tier. So a clique of 7 gives one group of 4, and 3
to its node.
"""

from __future__ import annotations

import numpy as np

NOWHERE = -1  # a unit that lies in no group of a tier, since its members lie in several


def pack(places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Join units to groups of `size`.

    Args:
        places: (tiers, units), the group of each tier in which a unit lies, `NOWHERE` where it crosses it; the finest
            tier first, all units in one group of the last.
        size: of the groups; it divides the number of units.

    Returns:
        The groups as numbers of units, (groups, size), in the order of their first units; and the places of the groups
        as those of the units, (tiers, groups).
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
    of_members = places[:, groups]
    same = (of_members == of_members[:, :, :1]).all(axis=2)
    return groups, np.where(same, of_members[:, :, 0], NOWHERE)


def _join(units: np.ndarray, places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of units that lie in one group of the last of these tiers, and the units that are left over."""
    # Finer tiers order the units of a group, so that those of one clique stay together.
    order = np.lexsort((units, *(places[tier, units] for tier in range(len(places)))))
    ordered = units[order]
    labels = places[-1, ordered]
    begins = np.flatnonzero(np.r_[True, labels[1:] != labels[:-1]]) if len(labels) else np.empty(0, dtype=int)
    counts = np.diff(np.r_[begins, len(labels)])
    place_in_label = np.arange(len(labels)) - np.repeat(begins, counts)
    whole = np.repeat(np.where(labels[begins] == NOWHERE, 0, counts // size * size), counts)
    taken = place_in_label < whole
    return ordered[taken].reshape(-1, size), np.sort(ordered[~taken])
