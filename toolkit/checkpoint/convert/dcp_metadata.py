"""Reads `.metadata` of a DCP folder, a pickle, without creating anything but plain records.

A pickle names functions and calls them, so that its author can run code as its reader. Here the names that DCP writes
resolve to a record that keeps its arguments, or to a string; any other name is refused before a call. The result is
untrusted data, which is checked like any other file's.
"""

import pickle
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from toolkit.checkpoint.convert.source_files import read_prefix, reading_source
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.errors import ToolkitError

METADATA = ".metadata"
_LONGEST_BYTES = 1_000_000_000
_TORCH = "torch.distributed.checkpoint"
_FETCH_AGAIN = "copy or fetch the whole folder again"


@dataclass(frozen=True)
class StoredItem:
    """The bytes of a piece of a tensor, or of a value: a stream of `torch.save` in a file of the folder."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor with the (offset, shape, bytes) of each piece."""

    dtype: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    pieces: tuple[tuple[tuple[int, ...], tuple[int, ...], StoredItem], ...]


@dataclass(frozen=True)
class StoredValue:
    """A value of the state other than a tensor."""

    path: tuple[str | int, ...]
    item: StoredItem


class _Record:
    """A placeholder for an object of DCP: keeps its arguments and state and calls nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        state = getattr(self, "state", None)
        return state.get(name) if isinstance(state, dict) else None


_RECORDS = {
    f"{_TORCH}.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    f"{_TORCH}.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}  # fmt: skip
_PLACEHOLDERS: dict[tuple[str, str], Any] = {
    (module, name): type(name, (_Record,), {}) for module, names in _RECORDS.items() for name in names
} | {("torch", dtype): dtype for dtype in ELEMENTS}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLACEHOLDERS:
            raise _RefusedError(f"it contains {module}.{name}")
        return _PLACEHOLDERS[module, name]


class _RefusedError(Exception):
    """The contents are not what DCP writes."""


def read_dcp_metadata(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredValue]]:
    """The tensors and values of a DCP folder by key; ToolkitError if the metadata contradicts itself or the folder."""
    path = folder / METADATA
    size, _ = read_prefix(path, "a folder of dcp.save")
    try:
        if path.is_symlink() or size > _LONGEST_BYTES:
            raise _RefusedError("it is a link, or too large")
        with reading_source(path), path.open("rb") as file:
            metadata = _Unpickler(file).load()
        return _contents(metadata, folder)
    except _RefusedError as error:
        why = str(error)
        fix = "save it again with a current torch, or convert it to a file there (dcp_to_torch_save) and import that"
    except (ToolkitError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a broken pickle raises almost anything
        why, fix = f"{type(error).__name__}: {error!s:.80}", f"{_FETCH_AGAIN}, or save it again"
    message = f"cannot be read safely as metadata of torch.distributed.checkpoint: {why}"
    raise ToolkitError(message, where=str(path), fix=fix)


def _contents(metadata: Any, folder: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredValue]]:
    records, stored = _table(metadata, "state_dict_metadata"), _table(metadata, "storage_data")
    paths = metadata.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    items = {}
    for index, info in stored.items():
        offset = _of(index, "MetadataIndex").get("offset")  # None for a value
        items[index.get("fqn"), () if offset is None else _counts(offset)] = _item(_of(info, "_StorageInfo"), folder)
    tensors, values = {}, {}
    for name, record in records.items():
        if not isinstance(name, str):
            raise _RefusedError(f"a key is {name!r:.40}")
        path = _path(paths.get(name, (name,)))
        if type(record).__name__ == "BytesStorageMetadata":
            values[name] = StoredValue(path, _stored_item(items, name, ()))
        else:
            tensors[name] = _tensor(name, path, _of(record, "TensorStorageMetadata"), items)
    return tensors, values


def _tensor(name: str, path: tuple[str | int, ...], record: _Record, items: dict[Any, StoredItem]) -> StoredTensor:
    properties = _of(record.get("properties"), "TensorProperties").state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if dtype not in ELEMENTS:
        raise _RefusedError(f"{name} has no element type")
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], StoredItem]] = []
    for chunk in record.get("chunks"):
        offset, shape = _counts(_of(chunk, "ChunkStorageMetadata").get("offsets")), _counts(chunk.get("sizes"))
        if pieces and 0 in shape:
            continue
        if offset in [begin for begin, extent, _ in pieces if 0 not in extent]:
            raise _RefusedError(f"{name} has two pieces at {list(offset)}")
        item = _stored_item(items, name, offset)
        if prod(shape) * ELEMENTS[dtype].size_bytes > item.length:
            raise _RefusedError(f"a piece of {name} of shape {list(shape)} has only {item.length} bytes")
        pieces.append((offset, shape, item))
    return StoredTensor(dtype, _counts(record.get("size")), path, tuple(pieces))


def _item(info: _Record, folder: Path) -> StoredItem:
    file, begin, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if info.get("transform_descriptors"):
        raise _RefusedError(f"{file!r:.80} was written through an extension")
    if not isinstance(file, str) or set(file) & {"/", "\0"} or file in ("", ".", ".."):
        raise _RefusedError(f"expected the name of a file in this folder, got {file!r:.80}")
    path = folder / file
    if path.is_symlink() or not path.is_file():
        raise _incomplete(folder, f"names the file {file}, which is missing or not a regular file")
    begin, length = _counts((begin, length))
    if begin + length > path.stat().st_size:
        raise _incomplete(folder, f"names bytes after the end of {file}, which may be truncated")
    return StoredItem(file, begin, length)


def _incomplete(folder: Path, message: str) -> ToolkitError:
    return ToolkitError(message, where=str(folder / METADATA), fix=_FETCH_AGAIN)


def _stored_item(items: dict[Any, StoredItem], name: str, offset: tuple[int, ...]) -> StoredItem:
    key = (name, offset)
    if key not in items:
        raise _RefusedError(f"it has no storage_data for {name} at {list(offset)}")
    return items[key]


def _table(metadata: Any, name: str) -> dict[Any, Any]:
    table = _of(metadata, "Metadata").get(name)
    if not isinstance(table, dict):
        raise _RefusedError(f"it has no {name}")
    return table


def _of(value: Any, kind: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != kind:
        raise _RefusedError(f"expected {kind}, got {value!r:.40}")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    if type(value).__name__ == "Size":
        (value,) = value.arguments
    if not isinstance(value, (tuple, list)) or not all(type(count) is int and 0 <= count < 2**63 for count in value):
        raise _RefusedError(f"expected numbers, got {value!r:.40}")
    return tuple(value)


def _path(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, (tuple, list)) or not value or not all(type(part) in (str, int) for part in value):
        raise _RefusedError(f"expected a path, got {value!r:.40}")
    return tuple(value)
