"""NVLinks between the GPUs of ranks, pair by pair: GPUs that are wired directly have more to some than to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.topology.node_kinds import NodeKind
from toolkit.topology.node_links import MOST_NVLINKS, nvlink_count
from toolkit.topology.nominal_links import nvlink_bytes_per_s
from toolkit.topology.rank_places import Place


@dataclass(frozen=True, eq=False)
class PairLinks:
    """How many NVLinks join two ranks of one clique inside a node.

    `counts` (kinds, places, places) are those of two GPUs by their places on a kind of node, `kind_of` and `place_of`
    (ranks,) say where a rank is, `link_bytes_per_s` (kinds,) is of one link and direction.
    """

    counts: np.ndarray
    kind_of: np.ndarray
    place_of: np.ndarray
    link_bytes_per_s: np.ndarray

    def bytes_per_s(self, groups: np.ndarray) -> np.ndarray:
        """What a rank of each group has to the others of it, (groups,): all go by the pair that has the fewest links.

        Args:
            groups: (groups, members) of ranks, two or more members, each group within one clique.
        """
        kinds, places = self.kind_of[groups[:, 0]], self.place_of[groups]
        others = groups.shape[1] - 1
        between = self.counts[kinds[:, None, None], places[:, :, None], places[:, None, :]]
        least = np.where(np.eye(others + 1, dtype=bool), MOST_NVLINKS, between).min(axis=(1, 2))
        together = np.where(least * others > MOST_NVLINKS, least, least * others)  # as `nvlinks_to` counts them
        found: np.ndarray = together * self.link_bytes_per_s[kinds]
        return found


def pair_links(kinds: Sequence[NodeKind], places: Sequence[Place]) -> PairLinks:
    """The links of these ranks. `kinds[number]` is the kind of node `number`; a rank without a GPU is in no clique."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    most = max(len(kind.gpus) for kind in numbers)
    counts = np.zeros((len(numbers), most, most), dtype=np.int64)
    for kind, number in numbers.items():
        at = {gpu.label: place for place, gpu in enumerate(kind.hardware.gpus)}
        for link in kind.hardware.links:
            for one, other in link.pairs if nvlink_count(link.link.value) else ():
                if one in at and other in at:
                    counts[number, at[one], at[other]] = nvlink_count(link.link.value)
                    counts[number, at[other], at[one]] = nvlink_count(link.link.value)
    return PairLinks(
        counts,
        np.array([0 if place.node is None else numbers[kinds[place.node]] for place in places], dtype=np.int64),
        np.array([place.gpu or 0 for place in places], dtype=np.int64),
        np.array([nvlink_bytes_per_s(kind.hardware) for kind in numbers]),
    )
