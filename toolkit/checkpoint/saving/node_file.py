"""Writes one shard file for all ranks of a node: thousands of files would overload a file system's metadata servers.

The first rank of the node creates the file and writes everything except the tensor data. Then each rank writes its own
pieces and digests the blocks that only it writes. The first rank digests the few blocks that several ranks share. All
ranks write through the page cache of one host, so they only need to agree on the offsets.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from toolkit.checkpoint.format.digests import BLOCK_BYTES, BlockDigests
from toolkit.checkpoint.format.shard_layout import ShardLayout
from toolkit.checkpoint.saving.shard_writer import open_for_writing, write_whole
from toolkit.comm.agreement import Ranks
from toolkit.comm.rank_failure import RankFailure
from toolkit.errors import OwnFailureError

T = TypeVar("T")
_ZEROS = memoryview(bytes(BLOCK_BYTES))


def write_with_node(
    path: Path, layout: ShardLayout, own: range, data: Callable[[], Sequence[memoryview]], ranks: Ranks
) -> BlockDigests | None:
    """Write this rank's pieces, those with the indices `own` in `layout`, together with the other ranks of the node.

    Returns the digests of the synced file on the first rank of the node, None on the others. Raises RankFailure if any
    rank of the node could not write its part.
    """
    is_first = ranks.place_on_node == 0
    _all_of_node(ranks, lambda: _create(path, layout) if is_first else None)
    digests = _all_of_node(ranks, lambda: _write_own(path, layout, own, data()))
    if not is_first:
        return None
    known = {block: digest for of_rank in digests for block, digest in of_rank.items()}
    return _finish(path, layout, known)


def _all_of_node(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Run `work` on each rank of the node and return all results on all of them; raises the worst RankFailure."""
    result: tuple[Any, str | None]
    try:
        result = work(), None
    except Exception as error:  # noqa: BLE001 - the others wait for this rank
        result = None, RankFailure.of(ranks.rank, error).to_json()
    answers = ranks.exchange_on_node(result)
    failures = [RankFailure.from_json(failure) for _, failure in answers if failure is not None]
    if failures:
        raise RankFailure.worst(failures)
    return [answer for answer, _ in answers]


def _create(path: Path, layout: ShardLayout) -> None:
    """Create or overwrite the file at its final size, with everything except the tensor data."""
    with open_for_writing(path) as descriptor:
        os.ftruncate(descriptor, layout.size)
        for first, end in layout.gaps():
            for start in range(first, end, BLOCK_BYTES):
                write_whole(descriptor, [_ZEROS[: min(end - start, BLOCK_BYTES)]], start)
        for first, content in layout.structure:
            write_whole(descriptor, [memoryview(content)], first)


def _write_own(path: Path, layout: ShardLayout, own: range, data: Sequence[memoryview]) -> dict[int, str]:
    """Write this rank's pieces. Returns the digests of the blocks that contain no other data."""
    shared = _shared_blocks(layout, own)
    parts: dict[int, list[tuple[int, memoryview]]] = defaultdict(list)
    for number, view in zip(own, data, strict=True):
        start = layout.starts[number]
        for block in range(start // BLOCK_BYTES, -(-(start + len(view)) // BLOCK_BYTES)) if len(view) else ():
            begin, end = max(start, block * BLOCK_BYTES), min(start + len(view), (block + 1) * BLOCK_BYTES)
            parts[block].append((begin, view[begin - start : end - start]))
    digests = {}
    # Without O_CREAT, so that this rank fails if a later attempt has renamed the folder.
    with open_for_writing(path, create=False) as descriptor:
        for block in sorted(parts):
            in_order = sorted(parts[block], key=lambda part: part[0])
            for begin, view in in_order:
                write_whole(descriptor, [view], begin)
            if block not in shared:
                digests[block] = _digest_with_zeros(in_order, block * BLOCK_BYTES, layout.size)
    return digests


def _shared_blocks(layout: ShardLayout, own: range) -> set[int]:
    """Return the blocks that contain bytes of other ranks, or of the HDF5 structure."""
    others = [
        (start, start + piece.size_bytes)
        for number, (start, piece) in enumerate(zip(layout.starts, layout.pieces, strict=True))
        if start and number not in own
    ]
    others += [(first, first + len(content)) for first, content in layout.structure]
    return {block for first, end in others for block in range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES))}


def _digest_with_zeros(parts: Sequence[tuple[int, memoryview]], first: int, size: int) -> str:
    """Return the digest of a block that consists of these parts with zeros between them."""
    digest = xxhash.xxh3_128()
    position = first
    for begin, view in [*parts, (min(first + BLOCK_BYTES, size), _ZEROS[:0])]:
        digest.update(_ZEROS[: begin - position])
        digest.update(view)
        position = begin + len(view)
    return digest.hexdigest()


def _finish(path: Path, layout: ShardLayout, known: dict[int, str]) -> BlockDigests:
    """Digest the blocks that several ranks share, and sync the file to the disk."""
    with open_for_writing(path, create=False) as descriptor:
        blocks = tuple(
            known.get(number)
            or _digest_of(descriptor, number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, layout.size))
            for number in range(-(-layout.size // BLOCK_BYTES))
        )
        os.fsync(descriptor)
    return BlockDigests(layout.size, blocks)


def _digest_of(descriptor: int, first: int, end: int) -> str:
    """Return the digest of the bytes [first, end) of the file."""
    digest = xxhash.xxh3_128()
    while first < end:
        data = os.pread(descriptor, end - first, first)
        if not data:
            raise OwnFailureError(f"the file ends at byte {first}, although {end - first} more bytes were written")
        digest.update(data)
        first += len(data)
    return digest.hexdigest()
