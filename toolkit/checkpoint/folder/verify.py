"""Checks that a checkpoint is complete. Quick: the manifest, and that all files exist in full size. Full: all bytes."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
from h5py import h5d

from toolkit.checkpoint.errors import CorruptCheckpointError, host_cannot_read
from toolkit.checkpoint.folder.whole_files import Block, Unreadable, read_whole
from toolkit.checkpoint.format.digests import BLOCK_BYTES, BlockDigests, read_digests, size_of_file
from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.filters import FILTER_NUMBERS
from toolkit.checkpoint.format.layout import MANIFEST, digest_name, step_of
from toolkit.checkpoint.format.manifest import FileRecord, Manifest, Piece, TensorRecord
from toolkit.checkpoint.format.manifest_body import files_from
from toolkit.checkpoint.format.manifest_file import manifest_in, read_body, read_manifest_text
from toolkit.checkpoint.format.shard_layout import dataset_name, escape

__all__ = ["Problem", "open_manifest", "verify_bytes", "verify_quickly"]

NAMED_TENSORS = 3


@dataclass(frozen=True)
class Problem:
    """One problem of a checkpoint: `block` is the number of a 4 MiB block, `tensors` those with bytes in it."""

    file: str
    what: str
    block: int | None = None
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"{self.file} block {self.block}" if self.block is not None else self.file
        names = ", ".join(self.tensors[:NAMED_TENSORS])
        more = len(self.tensors) - NAMED_TENSORS
        contents = f" (contains {names}{f' and {more} more' if more > 0 else ''})" if names else ""
        return f"{place}: {self.what}{contents}"


def open_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder; errors as in `read_manifest`, and OwnFailureError if this host cannot read it."""
    return manifest_in(folder, open_manifest_text(folder))


def open_manifest_text(folder: Path) -> str:
    """Return the text of a folder's manifest, unchecked; errors as in `open_manifest`."""
    path = folder / MANIFEST
    try:
        size_of_file(path)  # opening a pipe would block
        return read_manifest_text(folder)
    except OSError as error:
        raise host_cannot_read(error, path) from None


def verify_quickly(folder: Path, text: str | None = None) -> tuple[Manifest | None, list[Problem]]:
    """Check the manifest's own digest and step, and that each file exists with its size. Reads no data.

    `text` is the contents of the manifest file, if known.
    Raises OwnFailureError if this host cannot read the folder, and ToolkitError for a manifest of another version.
    """
    try:
        manifest = manifest_in(folder, open_manifest_text(folder) if text is None else text)
    except CorruptCheckpointError as error:
        return None, [Problem(Path(error.where).name, error.message)]
    return manifest, _wrong_step(folder, manifest.step) + _missing_or_cut(folder, manifest.files)


def is_whole(folder: Path) -> bool:
    """Return whether `verify_quickly` finds no problem, but without parsing the manifest's tensors; same errors."""
    path = folder / MANIFEST
    try:
        size_of_file(path)
        status = path.stat()
        step, files = _step_and_files(folder, (status.st_ino, status.st_mtime_ns, status.st_size))
        return not _wrong_step(folder, step) and not _missing_or_cut(folder, files)
    except CorruptCheckpointError:
        return False
    except OSError as error:
        raise host_cannot_read(error, path) from None


@lru_cache(maxsize=64)
def _step_and_files(folder: Path, _version: tuple[int, int, int]) -> tuple[object, tuple[FileRecord, ...]]:
    """Return the step and files of a manifest. Cached: with thousands of ranks, reading one takes a second."""
    body = read_body(folder)
    return body.get("step"), files_from(body, where=str(folder / MANIFEST))


def _missing_or_cut(folder: Path, files: Sequence[FileRecord]) -> list[Problem]:
    problems = []
    for file in files:
        path = folder / file.name
        try:
            size = size_of_file(path)
        except CorruptCheckpointError as error:
            problems.append(Problem(file.name, error.message))
            continue
        except OSError as error:
            raise host_cannot_read(error, path) from None
        if size != file.size:
            problems.append(Problem(file.name, f"has {size} bytes instead of {file.size}"))
    return problems


def _wrong_step(folder: Path, step: object) -> list[Problem]:
    """Return the problem of a folder whose name states another step than the manifest; its files may be undamaged."""
    named = step_of(folder)
    if named is None or named == step:
        return []
    return [Problem(MANIFEST, f"is of step {step}, but the folder is named after step {named}")]


def verify_fully(folder: Path) -> tuple[Manifest | None, list[Problem]]:
    """Check every byte of all listed files, except files that fail the quick check; errors as in `verify_quickly`."""
    manifest, problems = verify_quickly(folder)
    if manifest is None:
        return None, problems
    bad = {problem.file for problem in problems}
    return manifest, problems + verify_bytes(folder, manifest, bad)


def verify_bytes(
    folder: Path, manifest: Manifest, but: Collection[str] = (), read: Callable[[int], None] = lambda count: None
) -> list[Problem]:
    """Check every byte of the files that a manifest lists, and that HDF5 reads the same tensors from them.

    `but` contains the names of files to skip. Threads call `read` with the number of bytes read since their last call.
    Raises OwnFailureError if this host cannot read a file.
    """
    wanted = {folder / file.name: file for file in manifest.files if file.name not in but}
    problems = []
    for path, blocks in read_whole([(path, file.size) for path, file in wanted.items()], read):
        of_file = _problems_of(folder, wanted[path], blocks, manifest)
        if not of_file and path.suffix == ".h5":
            of_file = [
                Problem(path.name, what, tensors=(name,) if name else ())
                for name, what in differing_pieces(folder, path.name, manifest)
            ]
        problems += of_file
    return problems


def _problems_of(folder: Path, file: FileRecord, blocks: Sequence[Block], manifest: Manifest) -> list[Problem]:
    """Return the problems of a file: its damaged blocks if the digest file identifies them, otherwise one for all."""
    digests = tuple(block for block in blocks if isinstance(block, str))
    readable = len(digests) == len(blocks)
    if readable and BlockDigests(file.size, digests).whole == file.digest:
        return []
    saved = _saved_digests(folder, file)
    saved_blocks = saved.blocks if saved is not None else [None] * len(blocks)
    extents = _extents_in(manifest, file.name)
    problems = [
        Problem(file.name, problem, number, _tensors_in(extents, number))
        for number, (block, digest) in enumerate(zip(blocks, saved_blocks, strict=True))
        if (problem := _problem_of_block(block, digest))
    ]
    return problems or [Problem(file.name, "does not match its digest in the manifest")]


def _problem_of_block(block: Block, saved: str | None) -> str:
    if isinstance(block, Unreadable):
        return block.why
    return "was changed after it was saved" if saved is not None and block != saved else ""


def _saved_digests(folder: Path, file: FileRecord) -> BlockDigests | None:
    """Return the block digests that were saved with a shard file, or None if they are damaged or it is not a shard."""
    if not file.name.endswith(".h5"):
        return None
    try:
        saved = read_digests(folder / digest_name(file.name))
    except (OSError, CorruptCheckpointError):  # reported for the digest file, which the manifest also lists
        return None
    return saved if saved.whole == file.digest else None


def _extents_in(manifest: Manifest, file: str) -> list[tuple[int, int, str]]:
    """Return the (first byte, end, tensor name) of all pieces in a shard file."""
    return [
        (inside.start, inside.stop, name)
        for name, record in manifest.tensors.items()
        for piece in record.pieces
        if piece.file == file
        for inside in record.bytes_of_file(piece)
    ]


def _tensors_in(extents: Sequence[tuple[int, int, str]], block: int) -> tuple[str, ...]:
    """Return the names of the tensors with bytes in one block."""
    first, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
    names = (name for begins, ends, name in extents if begins < end and first < ends)
    return tuple(dict.fromkeys(names))  # this removes duplicates: a tensor may have several chunks in a block


def differing_pieces(folder: Path, file: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (tensor, problem) for each piece that HDF5 reads differently; ("", problem) if it cannot open the file."""
    # Opened by Python: if HDF5 opened the file, HDF5_USE_FILE_LOCKING=TRUE in the environment would override `locking`.
    with (folder / file).open("rb") as stream:
        try:
            shard = h5py.File(stream, "r")
        except OSError as error:
            yield "", f"is not a valid HDF5 file: {error}"
            return
        yield from _differing(shard, file, manifest)


def _differing(shard: h5py.File, file: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    with shard:
        for name, record in manifest.tensors.items():
            for piece in record.pieces:
                if piece.file == file and (problem := _difference(shard, name, record, piece)):
                    yield name, problem


def _difference(shard: h5py.File, name: str, record: TensorRecord, piece: Piece) -> str:
    """Return how HDF5 reads a piece differently, or "". Follows no soft or external links: they could open any file."""
    node: Any = shard
    try:
        for link in ("tensors", escape(name), dataset_name(piece.offset)):
            if not isinstance(node, h5py.Group) or not isinstance(node.get(link, getlink=True), h5py.HardLink):
                return f"HDF5 finds no hard link {link} for this tensor"
            node = node[link]
    except (KeyError, OSError, RuntimeError) as error:
        return f"HDF5 cannot read this tensor: {error.args[0]}"
    if not isinstance(node, h5py.Dataset):
        return "the file contains no HDF5 dataset for this tensor"
    if node.shape != piece.shape or not _has_same_bytes(node, piece):
        return "HDF5 reads this tensor from other bytes than the manifest states"
    if not node.id.get_type().equal(element(record.dtype).file_type()):
        return "HDF5 reads this tensor as another type than the manifest states"
    return ""


def _has_same_bytes(dataset: h5py.Dataset, piece: Piece) -> bool:
    """Return whether HDF5 reads a piece from the same bytes through the same filters as the manifest states."""
    properties = dataset.id.get_create_plist()
    filters = tuple(properties.get_filter(number)[0] for number in range(properties.get_nfilters()))
    if piece.chunks is None:
        return not filters and (not piece.size or dataset.id.get_offset() == piece.byte_offset)
    if dataset.chunks != piece.chunks.shape or filters != tuple(FILTER_NUMBERS[name] for name in piece.chunks.filters):
        return False
    stored: list[h5d.StoreInfo] = []
    dataset.id.chunk_iter(stored.append)
    ordered = sorted(stored, key=lambda chunk: chunk.chunk_offset)
    # The mask lists filters that were not applied to a chunk.
    return not any(chunk.filter_mask for chunk in ordered) and piece.chunks.places == tuple(
        (chunk.byte_offset, chunk.size) for chunk in ordered
    )
