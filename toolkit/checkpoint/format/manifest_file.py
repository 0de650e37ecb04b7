"""Reads and writes `manifest.json`, the last file that is written before the commit."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.layout import MANIFEST
from toolkit.checkpoint.format.manifest import Manifest, Piece, TensorRecord
from toolkit.checkpoint.format.manifest_body import manifest_from
from toolkit.checkpoint.format.typed_values import TAGS
from toolkit.errors import ToolkitError

__all__ = ["manifest_text", "read_body", "read_manifest"]

FORMAT = "toolkit-checkpoint"
# toolkit writes the lowest schema that fits, for older versions: 2 has compressed pieces, 3 also `TAGS`.
SCHEMAS = (1, 2, 3)
_UNSIGNED = "0" * 32


def manifest_text(manifest: Manifest, *, tensors: str = "") -> str:
    """Return the contents of the file. They include their own digest, computed with zeros in place of the digest.

    `tensors` is the result of `tensors_text` for the manifest's tensors, if known, because it takes the most time.
    """
    body = {
        "format": FORMAT,
        "schema": 1,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "world": {"size": manifest.world_size, "mesh": manifest.mesh},
        "saved_at": manifest.saved_at,
        "written_by": manifest.written_by,
        "state": jsonvalues.encode(manifest.state, "state"),
        "objects": {
            name: {"path": list(record.path), "value": jsonvalues.encode(record.value, name)}
            for name, record in manifest.objects.items()
        },
    }
    files = [{"name": file.name, "size": file.size, "digest": file.digest} for file in manifest.files]
    tensors = tensors or tensors_text(manifest.tensors, [file.name for file in manifest.files])
    start = json.dumps(body, allow_nan=False).removesuffix("}")
    start = start.replace('"schema": 1,', f'"schema": {_schema(manifest, start)},', 1)
    unsigned = f'{start}, "tensors": {tensors}, "files": {json.dumps(files)}, "digest": "{_UNSIGNED}"}}'
    head, tail = unsigned.rsplit(_UNSIGNED, 1)
    return head + xxhash.xxh3_128_hexdigest(unsigned.encode()) + tail


def _schema(manifest: Manifest, values: str) -> int:
    if any(f'{{"{tag}": ' in values for tag in TAGS):  # quotes in strings are escaped, so that only a tag matches
        return 3
    return 2 if any(record.filters for record in manifest.tensors.values()) else 1


def tensors_text(tensors: Mapping[str, TensorRecord], files: Sequence[str]) -> str:
    """Return the part that the manifests of all saves of a run share. `files`: the file names in manifest order."""
    # Pieces refer to their file by its index in `files`, because repeated names would be most of the manifest.
    index = {name: number for number, name in enumerate(files)}
    return json.dumps({name: _tensor_json(record, index) for name, record in tensors.items()}, allow_nan=False)


def _tensor_json(record: TensorRecord, index: Mapping[str, int]) -> dict[str, Any]:
    return {
        "dtype": record.dtype,
        "shape": list(record.shape),
        "path": list(record.path),
        **({"filters": list(record.filters)} if record.filters else {}),
        "pieces": [_piece_json(piece, index[piece.file]) for piece in record.pieces],
    }


def _piece_json(piece: Piece, file: int) -> list[Any]:
    plain = [file, list(piece.offset), list(piece.shape), piece.byte_offset]
    return plain if piece.chunks is None else [*plain, [list(piece.chunks.shape), list(map(list, piece.chunks.places))]]


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest. Raises CorruptCheckpointError if missing or damaged, ToolkitError for another version."""
    return manifest_in(folder, read_manifest_text(folder))


def manifest_in(folder: Path, text: str) -> Manifest:
    """Return the manifest in the text of a folder's manifest file; errors as in `read_manifest`."""
    return manifest_from(_body_in(folder, text), where=str(folder / MANIFEST))


def read_body(folder: Path) -> dict[str, Any]:
    """Return a manifest's JSON, after a check of its digest but not of its contents; errors as in `read_manifest`."""
    return _body_in(folder, read_manifest_text(folder))


def read_manifest_text(folder: Path) -> str:
    """Return the text of a manifest, unchecked. Raises CorruptCheckpointError if missing."""
    path = folder / MANIFEST
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        raise CorruptCheckpointError("is missing", where=str(path)) from None


def _body_in(folder: Path, text: str) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        body = json.loads(text)
        digest = body["digest"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptCheckpointError("is not a valid manifest", where=str(path)) from None
    head, _, tail = text.rpartition(str(digest))
    unsigned = head + _UNSIGNED + tail
    if xxhash.xxh3_128_hexdigest(unsigned.encode("utf-8", "surrogateescape")) != digest:
        raise CorruptCheckpointError("does not match its own digest", where=str(path))
    # The version is checked after the digest, so that a damaged file is not reported as another version.
    name, schema = body.get("format"), body.get("schema")
    if name != FORMAT or type(schema) is not int or schema not in SCHEMAS:  # in Python, true equals 1
        raise ToolkitError(
            f'expected format "{FORMAT}" with schema {" or ".join(map(str, SCHEMAS))}, '
            f"got {json.dumps(name):.80} with schema {json.dumps(schema):.40}",
            where=str(path),
            fix="use the version of toolkit that wrote this file, or a newer one",
        )
    checked: dict[str, Any] = body
    return checked
