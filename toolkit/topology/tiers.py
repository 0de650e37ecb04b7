"""Nested tiers of ranks, from the NVLink clique to the cluster, with the speed of the links in each tier.

A tier divides the ranks into groups, and each group is a part of one group of the next coarser tier. Two ranks
communicate over the finest tier that has both in one group: GPUs of a clique over NVLink, nodes of a leaf over its
switch. On a DGX the clique is inside the node; in a GB200 rack the node is inside the clique.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from toolkit.errors import ToolkitError

__all__ = ["Link", "Tiers", "tiers_of"]


@dataclass(frozen=True)
class Link:
    """The speed at which a rank communicates within a tier (but not a finer one) while all ranks communicate.

    Latency is in seconds, bandwidth in bytes per second and direction; `source` names the origin of the figures.
    """

    latency_s: float
    bytes_per_s: float
    source: str


class Pairs(Protocol):
    """The bandwidths between individual pairs of ranks, for a tier in which these differ."""

    def bytes_per_s(self, groups: np.ndarray) -> np.ndarray:
        """Return the bandwidth from a rank to the rest of its group: (groups, members) to (groups,)."""


@dataclass(frozen=True)
class Tier:
    """One tier. `group_of[rank]` is the number of the rank's group, counted from 0.

    If `pairs` is given, ranks within a group have the bandwidth of their pairs instead of `link`.
    """

    name: str
    group_of: np.ndarray
    link: Link
    pairs: Pairs | None = None


@dataclass(frozen=True)
class Tiers:
    """The tiers of a set of ranks, finest first; in the last tier, all ranks are in one group."""

    levels: tuple[Tier, ...]

    def __post_init__(self) -> None:
        assert self.levels, "a cluster has at least one tier"
        for fine, coarse in zip(self.levels, self.levels[1:], strict=False):
            pairs = np.unique(np.stack([fine.group_of, coarse.group_of]), axis=1)
            if len(pairs[0]) != len(np.unique(pairs[0])):
                raise ToolkitError(
                    f"expected each {fine.name} inside one {coarse.name}, got a {fine.name} that spans two",
                    where="topology",
                    fix="check the topology with `toolkit topo show`",
                )
        assert len(np.unique(self.levels[-1].group_of)) <= 1, "the last tier must contain all ranks in one group"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.levels[0].group_of)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tiers, finest first."""
        return tuple(level.name for level in self.levels)

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return the distinct group sizes of a tier in ranks, ascending; () if the tier does not exist."""
        for level in self.levels:
            if level.name == name:
                return tuple(int(size) for size in np.unique(np.bincount(level.group_of)))
        return ()

    def finest_common(self, groups: np.ndarray) -> np.ndarray:
        """Return, for each row of ranks (groups, members), the finest tier that has all of them in one group."""
        common = np.full(len(groups), len(self.levels) - 1)
        for number in range(len(self.levels) - 2, -1, -1):
            group_of_member = self.levels[number].group_of[groups]
            common[(group_of_member == group_of_member[:, :1]).all(axis=1)] = number
        return common


def tiers_of(columns: Sequence[tuple[str, Sequence[object], Link]]) -> Tiers:
    """Return tiers from (name, label of each rank, link), finest first, such as ("node", ["n1", "n1", "n2"], link).

    Ranks with equal labels in a tier form one group, even if their labels in a coarser tier differ.
    """
    levels = []
    for name, labels, link in columns:
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        levels.append(Tier(name, np.array([numbers[label] for label in labels], dtype=np.int64), link))
    return Tiers(tuple(levels))
