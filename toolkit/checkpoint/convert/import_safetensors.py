"""safetensors as a checkpoint: one file, or the files that a `model.safetensors.index.json` names. Without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.contents.stored_tensors import runs
from toolkit.checkpoint.convert.lone_writer import NewTensor
from toolkit.checkpoint.convert.safetensors_header import LONGEST_HEADER_BYTES, Entry, read_header
from toolkit.checkpoint.convert.source_files import FETCH_AGAIN, read_prefix, reading_source
from toolkit.checkpoint.format.elements import element
from toolkit.errors import NotFoundError, ToolkitError

_INDEX_SUFFIX = ".safetensors.index.json"
_SLICE_BYTES = 64 * 1024 * 1024


def read_safetensors(source: Path) -> dict[str, NewTensor]:
    """The tensors of a file or folder by name. All headers are read and checked, no data.

    Raises:
        NotFoundError: there is no such file.
        ToolkitError: a file is not a valid safetensors file, or an index does not fit the files beside it.
    """
    if not source.is_dir():
        entries = read_header(source)
        return {
            name: NewTensor(entry.dtype, entry.shape, (name,), partial(_pieces, source, name, entry))
            for name, entry in entries.items()
        }
    index = _only_match(source, f"*{_INDEX_SUFFIX}")
    if index is not None:
        return _read_indexed(index)
    single = _only_match(source, "*.safetensors")
    if single is None:
        raise NotFoundError("contains no safetensors file", where=str(source), fix="name the file or its folder")
    return read_safetensors(single)


def _only_match(folder: Path, pattern: str) -> Path | None:
    matches = sorted(folder.glob(pattern))
    if len(matches) > 1:
        names = ", ".join(path.name for path in matches[:3])
        raise ToolkitError(f"expected one {pattern}, got {names}", where=str(folder), fix="name one of these files")
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
            fix = "fetch the folder again; its files belong to different models"
            raise ToolkitError(f"{name!r:.80} is {place}", where=str(index), fix=fix)
        tensors |= stored
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Accepts only plain names of files beside the index, so that no path leads elsewhere."""
    again = "fetch the folder again"
    size, _ = read_prefix(index, "an index of safetensors files")
    if size > LONGEST_HEADER_BYTES:
        raise ToolkitError(f"expected an index of safetensors files, got {size} bytes", where=str(index), fix=again)
    try:
        with reading_source(index):
            body: Any = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ToolkitError(f"is not valid JSON: {error!s:.80}", where=str(index), fix=again) from None
    weight_map = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ToolkitError("has no weight_map", where=str(index), fix=again)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or set(file) & {"/", "\\", "\0"}:
            raise ToolkitError(
                f"expected a safetensors file of this folder for {name!r:.80}, got {file!r:.80}",
                where=str(index),
                fix="do not trust this folder; fetch it from its source",
            )
    return weight_map


def _pieces(path: Path, name: str, entry: Entry) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The tensor in slices of at most 64 MiB, which are read one at a time."""
    kind = element(entry.dtype, where=name)
    if 0 in entry.shape:
        yield (0,) * len(entry.shape), np.empty(entry.shape, kind.memory)
    with reading_source(path), path.open("rb") as file:
        file.seek(entry.begin)
        for offset, shape in runs(entry.shape, kind.size_bytes, _SLICE_BYTES):
            content = file.read(prod(shape) * kind.size_bytes)
            if len(content) != prod(shape) * kind.size_bytes:
                raise ToolkitError(f"is truncated in {name!r:.80}", where=str(path), fix=FETCH_AGAIN)
            if entry.dtype == "bool" and content.translate(None, b"\0\1"):
                message = f"{name!r:.80} is BOOL and contains bytes other than 0 and 1"
                raise ToolkitError(message, where=str(path), fix=FETCH_AGAIN)
            yield offset, np.frombuffer(content, kind.memory).reshape(shape)
