"""safetensors as a checkpoint: one file, or the files that a `model.safetensors.index.json` names. Without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.contents.stored_tensors import runs
from toolkit.checkpoint.convert.lone_writer import NewTensor
from toolkit.checkpoint.convert.safetensors_format import LONGEST_HEADER_BYTES, Entry, read_header
from toolkit.checkpoint.convert.source_files import FETCH_AGAIN, beginning_of, reading_source
from toolkit.checkpoint.format.elements import element
from toolkit.errors import NotFoundError, ToolkitError

_INDEX_ENDING = ".safetensors.index.json"
_SLICE_BYTES = 64 * 1024 * 1024


def tensors_of_safetensors(source: Path) -> dict[str, NewTensor]:
    """The tensors of a file or folder by name. All headers are read and checked, no data.

    Raises:
        NotFoundError: there is no such file.
        ToolkitError: a file is no good safetensors file, or an index does not fit the files beside it.
    """
    if not source.is_dir():
        return {name: _tensor(source, data, name, entry) for name, data, entry in _entries(source)}
    index = _only(source, f"*{_INDEX_ENDING}")
    if index is not None:
        return _tensors_of_index(index)
    single = _only(source, "*.safetensors")
    if single is None:
        raise NotFoundError("holds no safetensors file", where=str(source), fix="name the file or its folder")
    return tensors_of_safetensors(single)


def _only(folder: Path, pattern: str) -> Path | None:
    found = sorted(folder.glob(pattern))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise ToolkitError(f"holds several: {names}", where=str(folder), fix="name the one that you mean")
    return found[0] if found else None


def _tensors_of_index(index: Path) -> dict[str, NewTensor]:
    weight_map = _weight_map(index)
    tensors: dict[str, NewTensor] = {}
    for file in sorted(set(weight_map.values())):
        named = {name for name, of in weight_map.items() if of == file}
        path = index.parent / file
        found = {name: (data, entry) for name, data, entry in _entries(path)}
        if named != found.keys():
            name = min(named ^ found.keys())
            raise ToolkitError(
                f"{name!r:.80} is " + (f"not in {file}" if name in named else f"in {file}, which does not say so"),
                where=str(index),
                fix="fetch the folder again; its files are not of one model",
            )
        tensors |= {name: _tensor(path, data, name, entry) for name, (data, entry) in found.items()}
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Which file holds which tensor. Only plain names of files beside the index pass: no path leads anywhere else."""
    size, _ = beginning_of(index, "an index of safetensors files")
    if size > LONGEST_HEADER_BYTES:
        raise ToolkitError("is no index of safetensors files", where=str(index), fix="fetch the folder again")
    try:
        with reading_source(index):
            body: Any = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ToolkitError(f"is not JSON: {error!s:.80}", where=str(index), fix="fetch the folder again") from None
    weight_map = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ToolkitError("has no weight_map", where=str(index), fix="fetch the folder again")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & {"/", "\\", "\0"}
        if not plain:
            raise ToolkitError(
                f"{name!r:.80} is said to lie in {file!r:.80}, which is no file of this folder",
                where=str(index),
                fix="do not trust this folder; fetch it from where it was made",
            )
    return weight_map


def _entries(path: Path) -> Iterator[tuple[str, int, Entry]]:
    data, entries = read_header(path)
    for name, entry in entries.items():
        yield name, data, entry


def _tensor(path: Path, data: int, name: str, entry: Entry) -> NewTensor:
    return NewTensor(entry.dtype, entry.shape, (name,), _pieces(path, data, name, entry))


def _pieces(path: Path, data: int, name: str, entry: Entry) -> Callable[[], Iterator[tuple[tuple[int, ...], Any]]]:
    kind = element(entry.dtype, where=name)

    def read() -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        if 0 in entry.shape:
            yield (0,) * len(entry.shape), np.empty(entry.shape, kind.memory)
        with reading_source(path), path.open("rb") as file:
            file.seek(data + entry.begin)
            for offset, shape in runs(entry.shape, kind.size_bytes, _SLICE_BYTES):
                content = file.read(prod(shape) * kind.size_bytes)
                if len(content) != prod(shape) * kind.size_bytes:
                    raise ToolkitError(f"ended in {name!r:.80}", where=str(path), fix=FETCH_AGAIN)
                if entry.dtype == "bool" and content.translate(None, b"\0\1"):
                    raise ToolkitError(
                        f"{name!r:.80} is BOOL and holds other bytes than 0 and 1", where=str(path), fix=FETCH_AGAIN
                    )
                yield offset, np.frombuffer(content, kind.memory).reshape(shape)

    return read
