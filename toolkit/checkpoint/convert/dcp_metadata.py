"""Reads the pickle `.metadata` of a DCP folder without running code from it.

A pickle can call any function, so that its author can run code as the user who reads it. Here the names that DCP writes
resolve to a placeholder that only stores its arguments, or to a string. Any other name is rejected before a call. The
result is untrusted data, and is checked like other input.
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
    """Where a piece of a tensor or a value is stored: a `torch.save` stream within a file of the folder."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, and the (offset, shape, location) of each piece."""

    dtype: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    pieces: tuple[tuple[tuple[int, ...], tuple[int, ...], StoredItem], ...]


@dataclass(frozen=True)
class StoredValue:
    """A non-tensor value of the state."""

    path: tuple[str | int, ...]
    item: StoredItem


class _Record:
    """A placeholder for a DCP object: stores its arguments and state, and calls nothing."""

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
            raise _RefusedError(f"the pickle contains {module}.{name}, which this import does not accept")
        return _PLACEHOLDERS[module, name]


class _RefusedError(Exception):
    """The pickle contains something that DCP does not write."""


def read_dcp_metadata(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredValue]]:
    """Read tensors and values by key. Raises ToolkitError if the metadata contradicts itself or the DCP folder."""
    path = folder / METADATA
    size, _ = read_prefix(path, "a dcp.save folder")
    try:
        if path.is_symlink() or size > _LONGEST_BYTES:
            raise _RefusedError(f"the file is a symbolic link, or larger than {_LONGEST_BYTES:,} bytes")
        with reading_source(path), path.open("rb") as file:
            metadata = _Unpickler(file).load()
        return _contents(metadata, folder)
    except _RefusedError as error:
        why = str(error)
        fix = "save again with a current torch, or convert with dcp_to_torch_save and import the resulting file"
    except (ToolkitError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a broken pickle raises almost anything
        why, fix = f"{type(error).__name__}: {error!s:.80}", f"{_FETCH_AGAIN}, or save the checkpoint again"
    message = f"cannot be read safely as torch.distributed.checkpoint metadata: {why}"
    raise ToolkitError(message, where=str(path), fix=fix)


def _contents(metadata: Any, folder: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredValue]]:
    records, stored = _table(metadata, "state_dict_metadata"), _table(metadata, "storage_data")
    paths = metadata.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    items = {}
    for index, info in stored.items():
        offset = _of(index, "MetadataIndex").get("offset")  # None for a non-tensor value
        items[index.get("fqn"), () if offset is None else _counts(offset)] = _item(_of(info, "_StorageInfo"), folder)
    tensors, values = {}, {}
    for name, record in records.items():
        if not isinstance(name, str):
            raise _RefusedError(f"expected a string as a tensor name, got {name!r:.40}")
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
        raise _RefusedError(f"the element type of {name} is missing or not supported")
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
        raise _RefusedError(f"{file!r:.80} was written with a storage extension, such as compression")
    if not isinstance(file, str) or set(file) & {"/", "\0"} or file in ("", ".", ".."):
        raise _RefusedError(f"expected the name of a file in this folder, got {file!r:.80}")
    path = folder / file
    if path.is_symlink() or not path.is_file():
        raise _incomplete(folder, f"refers to the file {file}, which is missing or not a regular file")
    begin, length = _counts((begin, length))
    if begin + length > path.stat().st_size:
        raise _incomplete(folder, f"refers to bytes after the end of {file}, which may be truncated")
    return StoredItem(file, begin, length)


def _incomplete(folder: Path, message: str) -> ToolkitError:
    return ToolkitError(message, where=str(folder / METADATA), fix=_FETCH_AGAIN)


def _stored_item(items: dict[Any, StoredItem], name: str, offset: tuple[int, ...]) -> StoredItem:
    key = (name, offset)
    if key not in items:
        raise _RefusedError(f"storage_data has no entry for {name} at {list(offset)}")
    return items[key]


def _table(metadata: Any, name: str) -> dict[Any, Any]:
    table = _of(metadata, "Metadata").get(name)
    if not isinstance(table, dict):
        raise _RefusedError(f"{name} is missing or not a dict")
    return table


def _of(value: Any, kind: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != kind:
        raise _RefusedError(f"expected an object of class {kind}, got {value!r:.40}")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    if type(value).__name__ == "Size":
        (value,) = value.arguments
    if not isinstance(value, (tuple, list)) or not all(type(count) is int and 0 <= count < 2**63 for count in value):
        raise _RefusedError(f"expected non-negative integers, got {value!r:.40}")
    return tuple(value)


def _path(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, (tuple, list)) or not value or not all(type(part) in (str, int) for part in value):
        raise _RefusedError(f"expected a list of keys and indices, got {value!r:.40}")
    return tuple(value)
