"""One shard file for all ranks of a node: thousands of ranks would be thousands of files, which a file system's metadata
servers feel.

The first rank of the node makes the file and writes what is not data; then each writes its own pieces at their places.
Blocks that are one rank's alone are digested by it as it writes; the first rank digests the few that several share. All
of them write through the page cache of one host, so that nothing but the places must be agreed on.
"""

from __future__ import annotations

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
    """Write this rank's pieces of the node's file, together with the node's other ranks.

    Args:
        layout: of the whole file.
        own: which of its pieces are this rank's.
        data: gives their bytes.

    Returns:
        On the node's first rank the digests of the file, which is on the disk; None on the others.

    Raises:
        OSError, ToolkitError: this rank could not write its part.
        RankFailure: another of the node could not.
    """
    is_first = ranks.place_on_node == 0
    _all_of_node(ranks, lambda: _make(path, layout) if is_first else None)
    found = _all_of_node(ranks, lambda: _write_own(path, layout, own, data()))
    if not is_first:
        return None
    known = {block: digest for of_rank in found for block, digest in of_rank.items()}
    return _finish(path, layout, known)


def _all_of_node(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """What each rank of the node gives, on all of them, or the failure of the first that failed."""
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


def _make(path: Path, layout: ShardLayout) -> None:
    """The file at its size, with all that is not data; an older one may have stood there."""
    with open_for_writing(path) as descriptor:
        os.ftruncate(descriptor, layout.size)
        for first, end in layout.gaps():
            for start in range(first, end, BLOCK_BYTES):
                write_whole(descriptor, [_ZEROS[: min(end - start, BLOCK_BYTES)]], start)
        for first, text in layout.structure:
            write_whole(descriptor, [memoryview(text)], first)


def _write_own(path: Path, layout: ShardLayout, own: range, data: Sequence[memoryview]) -> dict[int, str]:
    """Write the own pieces; the digests of the blocks that hold nothing else."""
    shared = _shared_blocks(layout, own)
    parts: dict[int, list[tuple[int, memoryview]]] = defaultdict(list)
    for number, view in zip(own, data, strict=True):
        start = layout.starts[number]
        for block in range(start // BLOCK_BYTES, -(-(start + len(view)) // BLOCK_BYTES)) if len(view) else ():
            begin, end = max(start, block * BLOCK_BYTES), min(start + len(view), (block + 1) * BLOCK_BYTES)
            parts[block].append((begin, view[begin - start : end - start]))
    digests = {}
    # Without O_CREAT: where the folder was given to a later attempt, this rank must fail.
    with open_for_writing(path, create=False) as descriptor:
        for block in sorted(parts):
            found = sorted(parts[block], key=lambda part: part[0])
            for begin, view in found:
                write_whole(descriptor, [view], begin)
            if block not in shared:
                digests[block] = _digest_with_zeros(found, block * BLOCK_BYTES, layout.size)
    return digests


def _shared_blocks(layout: ShardLayout, own: range) -> set[int]:
    """The blocks that hold something that this rank does not write."""
    others = [
        (start, start + piece.size_bytes)
        for number, (start, piece) in enumerate(zip(layout.starts, layout.pieces, strict=True))
        if start and number not in own
    ]
    others += [(first, first + len(text)) for first, text in layout.structure]
    return {block for first, end in others for block in range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES))}


def _digest_with_zeros(parts: Sequence[tuple[int, memoryview]], first: int, size: int) -> str:
    """The digest of a block that holds these parts and zeros between them."""
    digest = xxhash.xxh3_128()
    position = first
    for begin, view in [*parts, (min(first + BLOCK_BYTES, size), _ZEROS[:0])]:
        digest.update(_ZEROS[: begin - position])
        digest.update(view)
        position = begin + len(view)
    return digest.hexdigest()


def _finish(path: Path, layout: ShardLayout, known: dict[int, str]) -> BlockDigests:
    """Digest the blocks that nobody could digest alone, and bring the file to the disk."""
    with open_for_writing(path, create=False) as descriptor:
        blocks = tuple(
            known.get(number)
            or _digest_of(descriptor, number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, layout.size))
            for number in range(-(-layout.size // BLOCK_BYTES))
        )
        os.fsync(descriptor)
    return BlockDigests(layout.size, blocks)


def _digest_of(descriptor: int, first: int, end: int) -> str:
    """The digest of what stands in a stretch of the file. The system may give less than it is asked for."""
    digest = xxhash.xxh3_128()
    while first < end:
        data = os.pread(descriptor, end - first, first)
        if not data:
            raise OwnFailureError(f"the file ends at byte {first}, where {end - first} more were written")
        digest.update(data)
        first += len(data)
    return digest.hexdigest()
