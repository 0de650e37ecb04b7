"""The header of a safetensors file: checked by the library when it is read, written here so that exports can stream.

The library serializes only tensors that are all in memory, and reads bfloat16 and float8 only with torch. So an export
writes the header in the library's documented form and appends the tensors' bytes, and the library checks the finished
file; an import lets the library check the header, and then reads the bytes at the offsets that follow from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from toolkit.checkpoint.convert.source_files import FETCH_AGAIN, LENGTH, format_from_prefix, read_prefix, reading_source
from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.manifest import MOST_DIMENSIONS
from toolkit.errors import OwnFailureError, ToolkitError

LONGEST_HEADER_BYTES = 100_000_000  # the limit of the library
_OWN_KEY = "__metadata__"
_DATA_ALIGNMENT = 8

# Without float8_e8m0fnu: the library accepts it, but returns it neither to torch nor to numpy.
CODES: dict[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; its bytes start at byte `begin` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


def import_library() -> Any:
    """The module `safetensors`.

    Raises:
        ToolkitError: it is not installed.
    """
    try:
        import safetensors
    except ImportError:
        fix = "pip install 'toolkit[safetensors]', or use another --format"
        raise ToolkitError("requires the Python package safetensors", where="safetensors", fix=fix) from None
    return safetensors


def refuse_unfit_tensor(dtype: str, key: str, name: str) -> None:
    """Refuse a tensor whose element type or name a safetensors file cannot contain.

    Raises:
        ToolkitError: naming the tensor and the reason.
    """
    if name == _OWN_KEY or any("\ud800" <= character <= "\udfff" for character in name):
        fix = "rename it, or exclude it with --only"
        raise ToolkitError(f"safetensors cannot contain a tensor named {name!r:.80}", fix=fix)
    if dtype not in CODES:
        fix = "exclude this tensor with --only, or export with --format torch or dcp"
        raise ToolkitError(f"safetensors cannot contain elements of type {dtype}", where=key, fix=fix)


def encode_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file that contains `tensors` (name: element type, shape) in this order without gaps."""
    header: dict[str, Any] = {_OWN_KEY: dict(metadata)}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + prod(shape) * element(dtype, where=name).size_bytes
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _DATA_ALIGNMENT)
    return LENGTH.pack(len(encoded)) + encoded


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file in the order of their bytes, which fill the file without gaps or overlaps.

    Raises:
        NotFoundError: there is no such file.
        ToolkitError: it is not a valid safetensors file, or contains a type that a checkpoint cannot contain.
    """
    library = import_library()
    size, prefix = read_prefix(path, "a safetensors file")
    if format_from_prefix(size, prefix) == "torch":
        raise ToolkitError("starts like a file of torch.save", where=str(path), fix="give --format torch")
    if len(prefix) < LENGTH.size:
        raise _invalid(path, f"expected at least {LENGTH.size} bytes, got {size}")
    header_bytes = LENGTH.unpack_from(prefix)[0]
    if size - LENGTH.size < header_bytes <= LONGEST_HEADER_BYTES:  # checked first, because the library allocates it
        raise _invalid(path, f"truncated: expected a header of {header_bytes} bytes, got {size - LENGTH.size}")
    try:
        # "pread" keeps no mapping: a file that shrinks while it is mapped would kill this process with SIGBUS.
        with reading_source(path), library.safe_open(path, framework="np", backend="pread") as file:
            # In this order, and without gaps: the library has checked it, and the sums give the offsets.
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            entries = _entries(path, slices, LENGTH.size + header_bytes)
        with reading_source(path), path.open("rb") as content:
            content.seek(LENGTH.size)
            json.loads(content.read(header_bytes), object_pairs_hook=_refuse_doubles)
    except library.SafetensorError as error:
        raise _invalid(path, str(error).removeprefix("Error while deserializing header: ")) from None
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"{error!s:.80}") from None
    except MemoryError as error:  # the library maps the file for a moment, which needs no memory but address space
        fix = "raise the limit of address space (`ulimit -v`), or use another host"
        raise OwnFailureError(f"cannot be opened: {error}", where=str(path), fix=fix) from None
    return entries


def _invalid(path: Path, why: str) -> ToolkitError:
    return ToolkitError(f"is not a valid safetensors file: {why}", where=str(path), fix=FETCH_AGAIN)


def _entries(path: Path, slices: Mapping[str, Any], begin: int) -> dict[str, Entry]:
    entries = {}
    for name, tensor in slices.items():
        code, shape = tensor.get_dtype(), tuple(tensor.get_shape())
        if code not in _DTYPES:
            raise _invalid(path, f"{name!r:.80} has elements of type {code}, which a checkpoint cannot contain")
        if len(shape) > MOST_DIMENSIONS:
            raise _invalid(path, f"{name!r:.80} has {len(shape)} dimensions; the limit is {MOST_DIMENSIONS}")
        entries[name] = Entry(_DTYPES[code], shape, begin)
        begin += prod(shape) * element(_DTYPES[code], where=name).size_bytes
    return entries


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):  # the library uses the last one
        raise ValueError("its header contains a key twice")
