"""Reads safetensors without torch: one file, or the files that a `model.safetensors.index.json` names.

The library checks the header. It can read bfloat16 and float8 only with torch, so toolkit reads the data itself.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.contents.stored_tensors import runs
from toolkit.checkpoint.convert.lone_writer import NewTensor
from toolkit.checkpoint.convert.source_files import FETCH_AGAIN, LENGTH, format_from_prefix, read_prefix, reading_source
from toolkit.checkpoint.format.elements import Element, element
from toolkit.checkpoint.format.manifest import MOST_DIMENSIONS
from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError

Ints = Sequence[int]
SLICE_BYTES = 64 * 1024 * 1024
_INDEX_SUFFIX = ".safetensors.index.json"
_LONGEST_HEADER_BYTES = 100_000_000  # the library's own limit

# float8_e8m0fnu is missing, because the library can return it neither to torch nor to numpy.
CODES: dict[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in CODES.items()}


def read_safetensors(source: Path) -> dict[str, NewTensor]:
    """Return the tensors of a file or folder by name. Checks all headers now, but reads the data later.

    Raises NotFoundError if there is no such file, and ToolkitError if a file is invalid or contradicts the index.
    """
    if not source.is_dir():
        return read_header(source)
    index = _only_match(source, f"*{_INDEX_SUFFIX}")
    if index is not None:
        return _read_indexed(index)
    single = _only_match(source, "*.safetensors")
    if single is None:
        raise NotFoundError("contains no safetensors file", where=str(source), fix="pass the file or its folder")
    return read_safetensors(single)


def _only_match(folder: Path, pattern: str) -> Path | None:
    matches = sorted(folder.glob(pattern))
    if len(matches) > 1:
        names = ", ".join(path.name for path in matches[:3])
        raise ToolkitError(f"expected one {pattern}, got {names}", where=str(folder), fix="pass one of these files")
    return matches[0] if matches else None


def _read_indexed(index: Path) -> dict[str, NewTensor]:
    weight_map = _weight_map(index)
    tensors: dict[str, NewTensor] = {}
    for file in sorted(set(weight_map.values())):
        listed = {name for name, its_file in weight_map.items() if its_file == file}
        stored = read_safetensors(index.parent / file)
        if listed != stored.keys():
            name = min(listed ^ stored.keys())
            place = f"in the index but not in {file}" if name in listed else f"in {file} but not in the index"
            fix = "fetch the folder again, because its files belong to different models"
            raise ToolkitError(f"{name!r:.80} is {place}", where=str(index), fix=fix)
        tensors |= stored
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor. Accepts only names of files next to the index, so no path leads elsewhere."""
    again = "fetch the folder again"
    size, _ = read_prefix(index, "an index of safetensors files")
    if size > _LONGEST_HEADER_BYTES:
        limit = f"expected an index of at most {_LONGEST_HEADER_BYTES} bytes"
        raise ToolkitError(f"{limit}, got {size} bytes", where=str(index), fix=again)
    try:
        with reading_source(index):
            body: Any = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ToolkitError(f"is not valid JSON: {error!s:.80}", where=str(index), fix=again) from None
    weight_map = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ToolkitError("contains no weight_map table", where=str(index), fix=again)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or set(file) & {"/", "\\", "\0"}:
            raise ToolkitError(
                f"expected a safetensors file of this folder for {name!r:.80}, got {file!r:.80}",
                where=str(index),
                fix="do not trust this folder; fetch it again from its source",
            )
    return weight_map


def import_library() -> Any:
    """Return the module `safetensors`. Raises ToolkitError if it is not installed."""
    try:
        import safetensors
    except ImportError:
        fix = "pip install 'toolkit[safetensors]', or use another --format"
        raise ToolkitError("the Python package safetensors is not installed", where="safetensors", fix=fix) from None
    return safetensors


def read_header(path: Path) -> dict[str, NewTensor]:
    """Return the tensors of a file in file order; their bytes fill the file without gaps or overlaps.

    Raises NotFoundError if there is no such file, and ToolkitError if it is invalid or has an unsupported type.
    """
    library = import_library()
    size, prefix = read_prefix(path, "a safetensors file")
    if format_from_prefix(size, prefix) == "torch":
        raise ToolkitError("looks like a torch.save file", where=str(path), fix="pass --format torch")
    if len(prefix) < LENGTH.size:
        raise _invalid(path, f"expected at least {LENGTH.size} bytes, got {size}")
    header_bytes = LENGTH.unpack_from(prefix)[0]
    # Checked before the library allocates memory for the header.
    if size - LENGTH.size < header_bytes <= _LONGEST_HEADER_BYTES:
        raise _invalid(path, f"truncated: expected a header of {header_bytes} bytes, got {size - LENGTH.size}")
    try:
        # "pread" does not map the file: if a mapped file shrank, SIGBUS would kill this process.
        with reading_source(path), library.safe_open(path, framework="np", backend="pread") as file:
            # The library has checked that tensors are stored in this order without gaps, so sizes determine offsets.
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            tensors = _tensors(path, slices, LENGTH.size + header_bytes)
        with reading_source(path), path.open("rb") as content:
            content.seek(LENGTH.size)
            json.loads(content.read(header_bytes), object_pairs_hook=_refuse_doubles)
    except library.SafetensorError as error:
        raise _invalid(path, str(error).removeprefix("Error while deserializing header: ")) from None
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"{error!s:.80}") from None
    except MemoryError as error:  # the library briefly maps the file, which requires address space
        fix = "raise the address space limit (`ulimit -v`), or use another host"
        raise OwnFailureError(f"cannot be opened: {error}", where=str(path), fix=fix) from None
    return tensors


def _invalid(path: Path, why: str) -> ToolkitError:
    return ToolkitError(f"is not a valid safetensors file: {why}", where=str(path), fix=FETCH_AGAIN)


def _tensors(path: Path, slices: dict[str, Any], begin: int) -> dict[str, NewTensor]:
    tensors = {}
    for name, stored in slices.items():
        code, shape = stored.get_dtype(), tuple(stored.get_shape())
        if code not in _DTYPES:
            raise _invalid(path, f"tensor {name!r:.80} has elements of type {code}, which a checkpoint cannot contain")
        if len(shape) > MOST_DIMENSIONS:
            raise _invalid(path, f"tensor {name!r:.80} has {len(shape)} dimensions; the limit is {MOST_DIMENSIONS}")
        kind = element(_DTYPES[code], where=name)
        stored_as = (path, name, kind, shape, begin)
        tensors[name] = NewTensor(kind.name, shape, (name,), partial(_pieces, *stored_as), partial(_box, *stored_as))
        begin += prod(shape) * kind.size_bytes
    return tensors


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):  # the library accepts duplicates and uses the last one
        raise ValueError("the header contains a key twice")


def _pieces(
    path: Path, name: str, kind: Element, shape: tuple[int, ...], begin: int
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield a tensor in slices of at most 64 MiB, reading one at a time."""
    if 0 in shape:
        yield (0,) * len(shape), np.empty(shape, kind.memory)
    with reading_source(path), path.open("rb") as file:
        file.seek(begin)
        for offset, extent in runs(shape, kind.size_bytes, SLICE_BYTES):
            content = file.read(prod(extent) * kind.size_bytes)
            if len(content) != prod(extent) * kind.size_bytes:
                raise ToolkitError(f"is truncated within tensor {name!r:.80}", where=str(path), fix=FETCH_AGAIN)
            if kind.name == "bool" and content.translate(None, b"\0\1"):
                message = f"tensor {name!r:.80} has type BOOL, but contains bytes other than 0 and 1"
                raise ToolkitError(message, where=str(path), fix=FETCH_AGAIN)
            yield offset, np.frombuffer(content, kind.memory).reshape(extent)


def _box(path: Path, name: str, kind: Element, whole: Ints, begin: int, offset: Ints, shape: Ints) -> np.ndarray:
    """Read the part of a tensor at `offset`, without the bytes between its runs."""
    array = np.empty(tuple(shape), kind.memory)
    # A run spans the innermost dimensions that are whole, and one dimension that may be partial.
    outer = max((dim for dim, length in enumerate(shape) if length != whole[dim]), default=0)
    with reading_source(path), path.open("rb") as file:
        for index in np.ndindex(*shape[:outer]) if array.size else ():
            place = [at + inner for at, inner in zip_longest(offset, index, fillvalue=0)]
            first = int(np.ravel_multi_index(place, tuple(whole))) if place else 0
            file.seek(begin + first * kind.size_bytes)
            run = array[(*index, ...)].reshape(-1).view(np.uint8)
            if file.readinto(run.data) != run.size:
                raise ToolkitError(f"is truncated within tensor {name!r:.80}", where=str(path), fix=FETCH_AGAIN)
    return array
