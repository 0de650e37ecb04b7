"""NVLinks between the GPUs of each pair of ranks: with direct wiring, the count differs between pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.topology.links.nodes import MOST_NVLINKS, nvlink_count
from toolkit.topology.links.nominal import nvlink_bytes_per_s
from toolkit.topology.node_kinds import NodeKind
from toolkit.topology.rank_places import Place


@dataclass(frozen=True, eq=False)
class PairLinks:
    """The number of NVLinks between two ranks of one clique inside a node.

    Attributes:
        counts: (kinds, places, places), between two GPUs by their places on a kind of node.
        kind_of, place_of: (ranks,), the kind of node and the GPU's place of a rank.
        link_bytes_per_s: (kinds,), of one link and direction.
    """

    counts: np.ndarray
    kind_of: np.ndarray
    place_of: np.ndarray
    link_bytes_per_s: np.ndarray

    def bytes_per_s(self, groups: np.ndarray) -> np.ndarray:
        """The rate from a rank to the others of its group, (groups,); the pair with the fewest links decides.

        Args:
            groups: (groups, members) of ranks, two or more members, each group within one clique.
        """
        kinds, places = self.kind_of[groups[:, 0]], self.place_of[groups]
        others = groups.shape[1] - 1
        between = self.counts[kinds[:, None, None], places[:, :, None], places[:, None, :]]
        least = np.where(np.eye(others + 1, dtype=bool), MOST_NVLINKS, between).min(axis=(1, 2))
        together = np.where(least * others > MOST_NVLINKS, least, least * others)  # as in `nvlinks_to`
        rates: np.ndarray = together * self.link_bytes_per_s[kinds]
        return rates


def pair_links(kinds: Sequence[NodeKind], places: Sequence[Place]) -> PairLinks:
    """The links of these ranks; `kinds[number]` is the kind of node `number`. A rank without a GPU is in no clique."""
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
