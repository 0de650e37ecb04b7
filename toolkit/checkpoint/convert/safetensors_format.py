"""safetensors files: eight bytes of length, a JSON header, and the tensors' bytes one behind the other.

The format is small and its description complete (github.com/huggingface/safetensors, "Format"), so both directions
stand here: its library can write a file only from tensors that are all in memory, and needs torch for bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from toolkit.checkpoint.convert.beginnings import LENGTH, format_of_beginning
from toolkit.checkpoint.convert.source_files import FETCH_AGAIN, beginning_of, reading_source
from toolkit.checkpoint.format.elements import ELEMENTS, element
from toolkit.checkpoint.format.manifest import MOST_DIMENSIONS
from toolkit.errors import ToolkitError

LONGEST_HEADER_BYTES = 100_000_000  # the limit of the library
_OWN_KEY = "__metadata__"

# float8_e8m0fnu is left out: the library lists it, and its readers give it back neither to torch nor to numpy.
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
    """One tensor of a file: its bytes are [begin, end) of the data, which begin behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def code_of(dtype: str, name: str) -> str:
    """What safetensors calls an element type.

    Raises:
        ToolkitError: it has no such type.
    """
    if dtype not in CODES:
        raise ToolkitError(
            f"{dtype} has no place in safetensors",
            where=name,
            fix="leave this tensor out (--only), or export with --format torch or dcp",
        )
    return CODES[dtype]


def refuse_safetensors(path: Path) -> None:
    """Where a file of torch is wanted.

    Raises:
        ToolkitError: it is a safetensors file, by its beginning.
    """
    size, start = beginning_of(path, "a file of torch.save")
    if format_of_beginning(size, start) == "safetensors":
        raise ToolkitError("begins as a safetensors file does", where=str(path), fix="give --format safetensors")


def header_of(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file that holds `tensors` (name: element type, shape) in this order without gaps."""
    header: dict[str, Any] = {_OWN_KEY: dict(metadata)}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + prod(shape) * element(dtype, where=name).size_bytes
        header[name] = {"dtype": code_of(dtype, name), "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8
    return LENGTH.pack(len(text)) + text


def refuse_name(name: str) -> None:
    """Refuse names that a header cannot hold.

    Raises:
        ToolkitError: it is the header's own key, or no text that UTF-8 can say.
    """
    if name == _OWN_KEY or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ToolkitError(
            f"a tensor called {name!r:.80} has no place in safetensors", fix="rename it, or leave it out with --only"
        )


def read_header(path: Path) -> tuple[int, dict[str, Entry]]:
    """The place of the data in a file, and its tensors in the order of their bytes.

    Nothing in the header is believed: lengths and offsets lie inside the file, shapes fit their bytes, and the tensors
    fill the file without gaps or overlaps. No memory is taken before that but for the header itself.

    Raises:
        NotFoundError: there is no such file.
        ToolkitError: it is no such file, or holds a type that a checkpoint has not.
    """
    size, start = beginning_of(path, "a safetensors file")
    if format_of_beginning(size, start) == "torch":
        raise ToolkitError("begins as a file of torch.save does", where=str(path), fix="give --format torch")
    try:
        length = _header_bytes(start, size)
        with reading_source(path), path.open("rb") as file:
            file.seek(LENGTH.size)
            header = json.loads(file.read(length).decode(), object_pairs_hook=_without_doubles)
        return LENGTH.size + length, _entries(header, size - LENGTH.size - length)
    except _RefusedError as error:
        raise _not_safetensors(path, str(error)) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise _not_safetensors(path, f"its header is not JSON: {error!s:.80}") from None


class _RefusedError(Exception):
    """What a header says cannot be so."""


def _not_safetensors(path: Path, why: str) -> ToolkitError:
    return ToolkitError(f"is no good safetensors file: {why}", where=str(path), fix=FETCH_AGAIN)


def _header_bytes(start: bytes, size: int) -> int:
    """The length of the header of a file of `size` bytes that begins with `start`."""
    if len(start) < LENGTH.size:
        raise _RefusedError(f"it has {size} bytes, and a length alone takes {LENGTH.size}")
    length: int = LENGTH.unpack(start[: LENGTH.size])[0]
    if length > LONGEST_HEADER_BYTES:
        raise _RefusedError(f"its first {LENGTH.size} bytes are no length of a header")
    if length > size - LENGTH.size:
        raise _RefusedError(f"it was cut: its header has {length} bytes, and {size - LENGTH.size} are there")
    return length


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RefusedError("its header says a key twice")
    return found


def _entries(header: Any, data_bytes: int) -> dict[str, Entry]:
    if not isinstance(header, dict):
        raise _RefusedError("its header is no table")
    found = {name: _entry(name, said) for name, said in header.items() if name != _OWN_KEY}
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    place = 0
    for name, entry in ordered.items():
        if entry.begin != place:
            raise _RefusedError(f"{name!r:.80} begins at byte {entry.begin} of the data, where byte {place} is next")
        place = entry.end
    if place != data_bytes:
        cut = "it was cut: " if place > data_bytes else ""
        raise _RefusedError(f"{cut}its tensors have {place} bytes, and {data_bytes} follow its header")
    return ordered


def _entry(name: str, said: Any) -> Entry:
    if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
        raise _RefusedError(f"{name!r:.80} is not described by dtype, shape and data_offsets")
    code, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise _RefusedError(f"{name!r:.80} is of type {code!r:.40}, which a checkpoint cannot take from here")
    if not _are_counts(shape) or len(shape) > MOST_DIMENSIONS:
        raise _RefusedError(f"{name!r:.80} has the shape {shape!r:.80}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _RefusedError(f"{name!r:.80} has the offsets {offsets!r:.80}")
    begin, end = offsets
    needed = prod(shape) * ELEMENTS[_DTYPES[code]].size_bytes
    if end - begin != needed:
        raise _RefusedError(f"{name!r:.80} of {code} {shape!r:.80} needs {needed} bytes and has {end - begin}")
    return Entry(_DTYPES[code], tuple(shape), begin, end)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**63 for one in value)
