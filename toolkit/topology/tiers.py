"""Ranks in nested tiers, from the NVLink clique to the cluster, and what a link of each tier carries.

A tier divides the ranks into groups; each group lies in one group of the next coarser tier. Two ranks talk over the
finest tier that has both in one group: GPUs of a clique over NVLink, nodes of a leaf over its switch. On a DGX the
clique lies in the node; in a GB200 rack the node lies in the clique.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from toolkit.errors import ToolkitError


@dataclass(frozen=True)
class Link:
    """What one rank gets when it talks within a tier and not within a finer one, all ranks at once.

    Latency in seconds, bandwidth in bytes per second and direction; `source` says where the figures are from.
    """

    latency_s: float
    bytes_per_s: float
    source: str


class Pairs(Protocol):
    """What single pairs of ranks have where they are not alike within a tier."""

    def bytes_per_s(self, groups: np.ndarray) -> np.ndarray:
        """What a rank of each group has to the others of it: (groups, members) to (groups,)."""


@dataclass(frozen=True)
class Tier:
    """One level. `group_of[rank]` is the number of the rank's group, counted from 0.

    Where `pairs` tells what single pairs have, ranks that are a part of a group have that of their own pairs.
    """

    name: str
    group_of: np.ndarray
    link: Link
    pairs: Pairs | None = None


@dataclass(frozen=True)
class Tiers:
    """Tiers of the same ranks, the finest first; the last has all ranks in one group."""

    levels: tuple[Tier, ...]

    def __post_init__(self) -> None:
        assert self.levels, "a cluster is one tier, at least"
        for fine, coarse in zip(self.levels, self.levels[1:], strict=False):
            pairs = np.unique(np.stack([fine.group_of, coarse.group_of]), axis=1)
            if len(pairs[0]) != len(np.unique(pairs[0])):
                raise ToolkitError(
                    f"a {fine.name} lies in two of {coarse.name}", where="topology", fix="see `toolkit topo show`"
                )
        assert len(np.unique(self.levels[-1].group_of)) <= 1, "the last tier holds all"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.levels[0].group_of)

    @property
    def names(self) -> tuple[str, ...]:
        """The tiers' names, the finest first."""
        return tuple(level.name for level in self.levels)

    def sizes(self, name: str) -> tuple[int, ...]:
        """How many ranks the groups of a tier have, each size once, ascending; none where there is no such tier."""
        for level in self.levels:
            if level.name == name:
                return tuple(int(size) for size in np.unique(np.bincount(level.group_of)))
        return ()

    def finest_common(self, groups: np.ndarray) -> np.ndarray:
        """For each row of ranks (groups, members) the number of the finest tier that has them all in one group."""
        common = np.full(len(groups), len(self.levels) - 1)
        for number in range(len(self.levels) - 2, -1, -1):
            found = self.levels[number].group_of[groups]
            common[(found == found[:, :1]).all(axis=1)] = number
        return common


def tiers_of(columns: Sequence[tuple[str, Sequence[object], Link]]) -> Tiers:
    """Tiers from one label a rank and tier, the finest first: ("node", ["n1", "n1", "n2"], link).

    Labels of a tier are those of its groups: equal ones are one group, whatever coarser group they stand in.
    """
    levels = []
    for name, labels, link in columns:
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        levels.append(Tier(name, np.array([numbers[label] for label in labels], dtype=np.int64), link))
    return Tiers(tuple(levels))
