"""Is a checkpoint whole? Quickly: the manifest and every file's presence and size. In full: every byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.digests import BLOCK_BYTES, BlockDigests, digests_of_file, read_digests, size_of_file
from toolkit.checkpoint.elements import element
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.layout import digest_name
from toolkit.checkpoint.manifest import FileRecord, Manifest
from toolkit.checkpoint.manifest_file import read_manifest

NAMED_TENSORS = 3


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `block` counts 4 MiB blocks; `tensors` have bytes in it.

    As text it names the first few of the tensors.
    """

    file: str
    what: str
    block: int | None = None
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"{self.file} block {self.block}" if self.block is not None else self.file
        names = ", ".join(self.tensors[:NAMED_TENSORS])
        more = len(self.tensors) - NAMED_TENSORS
        holds = f" (holds {names}{f' and {more} more' if more > 0 else ''})" if names else ""
        return f"{place}: {self.what}{holds}"


def verify_quickly(folder: Path) -> tuple[Manifest | None, list[Problem]]:
    """Check the manifest's own digest, and presence and size of every file; no data are read."""
    try:
        manifest = read_manifest(folder)
    except CorruptCheckpointError as error:
        return None, [Problem(Path(error.where).name, error.message)]
    problems = []
    for file in manifest.files:
        path = folder / file.name
        try:
            size = size_of_file(path)
        except CorruptCheckpointError as error:
            problems.append(Problem(file.name, error.message))
            continue
        if size != file.size:
            problems.append(Problem(file.name, f"has {size} bytes instead of {file.size}"))
    return manifest, problems


def verify_fully(folder: Path) -> tuple[Manifest | None, list[Problem]]:
    """Check every byte of every file that the manifest lists; files already found bad are not read."""
    manifest, problems = verify_quickly(folder)
    if manifest is None:
        return None, problems
    bad = {problem.file for problem in problems}
    for file in manifest.files:
        if file.name not in bad and (found := digests_of_file(folder / file.name)).whole != file.digest:
            problems += _differing_blocks(folder, file, found, manifest)
    return manifest, problems


def _differing_blocks(folder: Path, file: FileRecord, found: BlockDigests, manifest: Manifest) -> list[Problem]:
    """The damaged blocks of a shard file, where its own digest file can tell; otherwise the whole file."""
    whole = [Problem(file.name, "does not have the digest that the manifest states")]
    if not file.name.endswith(".h5"):
        return whole
    try:
        saved = read_digests(folder / digest_name(file.name))
    except (FileNotFoundError, CorruptCheckpointError):
        return whole
    if saved.whole != file.digest:
        return whole
    return [
        Problem(file.name, "was changed after it was saved", block, tensors_in_block(manifest, file.name, block))
        for block, (now, then) in enumerate(zip(found.blocks, saved.blocks, strict=True))
        if now != then
    ]


def tensors_in_block(manifest: Manifest, file: str, block: int) -> tuple[str, ...]:
    """Names of the tensors with bytes in one block of a shard file."""
    first, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
    return tuple(
        name
        for name, record in manifest.tensors.items()
        for piece in record.pieces
        if piece.file == file
        and piece.byte_offset < end
        and first < piece.byte_offset + piece.size * element(record.dtype).size_bytes
    )
