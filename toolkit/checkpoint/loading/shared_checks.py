"""Assigns block checks to ranks: if several ranks of a node read a block, only one of them checks its digest."""

import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.checkpoint.loading.planned import piece_of
from toolkit.checkpoint.loading.wanted import blocks_of_box

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Touched:
    """The blocks of each shard file that one rank reads, and the rank's node."""

    node: str
    blocks: dict[str, set[int]]


def node_name() -> str:
    """Return a string that identifies this node. All processes of a node share its page cache."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # the system is not Linux, or hides /proc; the host name usually identifies a node
        return socket.gethostname()


def touched_blocks(manifest: Manifest, items: Iterable[ReadItem]) -> dict[str, set[int]]:
    """Return the blocks that the items of a plan read, by shard file."""
    touched: dict[str, set[int]] = defaultdict(set)
    for item in items:
        if item.type == LoadItemType.BYTE_IO or 0 in item.lengths:
            continue
        record = manifest.tensors[item.storage_index.fqn]
        piece = piece_of(record, item.storage_index)
        size = element(record.dtype).size_bytes
        touched[piece.file].update(blocks_of_box(piece, item.storage_offsets, item.lengths, size))
    return dict(touched)


def shares_of_checks(of_ranks: Sequence[Touched]) -> list[dict[str, set[int]]]:
    """Return the result of `share_of_checks` for each rank; ranks with the same node name are on one node."""
    nodes: dict[str, list[Touched]] = defaultdict(list)
    shares = []
    for touched in of_ranks:
        nodes[touched.node].append(touched)
    places = dict.fromkeys(nodes, 0)
    for touched in of_ranks:
        of_node = [other.blocks for other in nodes[touched.node]]
        shares.append(share_of_checks(of_node, places[touched.node]))
        places[touched.node] += 1
    return shares


def share_of_checks(of_node: Sequence[dict[str, set[int]]], place: int) -> dict[str, set[int]]:
    """Return the blocks that this rank reads but another rank of its node checks, so that each block is checked once.

    `of_node` contains the blocks of each rank of the node, in the same order on all; `place` is the index of this rank.
    """
    others: dict[str, set[int]] = {}
    for file, blocks in of_node[place].items():
        readers: dict[int, list[int]] = defaultdict(list)
        for rank, touched in enumerate(of_node):
            for block in touched.get(file, ()):
                readers[block].append(rank)
        # Readers take turns by block number, which distributes the checks evenly.
        others[file] = {block for block in blocks if readers[block][block % len(readers[block])] != place}
    return others
