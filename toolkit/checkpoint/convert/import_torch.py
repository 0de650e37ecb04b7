"""Torch's own files as a checkpoint: what `torch.save` wrote, or a folder of `dcp.save`. No pickle gets a say.

`torch.load(weights_only=True)` reads tensors and plain values and nothing else; a file that asks for more is refused.
"""

from __future__ import annotations

import errno
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.checkpoint.convert.beginnings import ZIP, format_of_beginning
from toolkit.checkpoint.convert.dcp_metadata import StoredItem, StoredTensor, read_dcp_metadata
from toolkit.checkpoint.convert.lone_writer import NewTensor
from toolkit.checkpoint.convert.nesting import joined, leaves, refuse_unfolding
from toolkit.checkpoint.convert.source_files import FETCH_AGAIN, beginning_of, reading_source
from toolkit.checkpoint.format.manifest import ObjectRecord, check_dimensions
from toolkit.checkpoint.tensors import as_numpy, dtype_name
from toolkit.errors import ToolkitError

_TAKE_MORE = "take what is around it, or leave --only out"


@dataclass
class Found:
    """What a source holds, by key."""

    tensors: dict[str, NewTensor] = field(default_factory=dict)
    values: dict[str, ObjectRecord] = field(default_factory=dict)


def found_in_file(source: Path, only: str = "") -> Found:
    """The tensors and values of a file of `torch.save`. Tensors stay in the file until they are written.

    Args:
        only: what is taken, the first parts of keys joined with dots; it is taken off.

    Raises:
        ToolkitError: it holds something other than tensors and plain values, or is no such file.
    """
    mapped = _is_zip(source)  # older files than those of torch 1.6 are read into memory
    if mapped:
        _refuse_compressed(source, str(source))
    state = _loaded(partial(torch.load, source, mmap=mapped), str(source))
    found = Found()
    for path, value in leaves(_part(state, only, source), _is_tensor, where=str(source)):
        key = joined(path)
        if key in found.tensors or key in found.values:
            raise ToolkitError(f"two of its keys are {key}", where=str(source), fix="save it with other keys")
        if _is_tensor(value):
            found.tensors[key] = _new_tensor(value, path, key, source)
        else:
            found.values[key] = ObjectRecord(path, value)
    return found


def found_in_dcp(source: Path) -> Found:
    """The tensors and values of a folder of `dcp.save`. One piece of a tensor at a time is read, when it is written.

    Raises:
        ToolkitError: its metadata is not what DCP writes, or it holds other values than plain ones.
    """
    tensors, values = read_dcp_metadata(source)
    return Found(
        {name: _new_dcp_tensor(source, name, tensor) for name, tensor in tensors.items()},
        {name: ObjectRecord(value.path, _dcp_item(source, name, value.item)) for name, value in values.items()},
    )


def _is_zip(source: Path) -> bool:
    """True of a file of torch.save, False of one older than torch 1.6.

    Raises:
        NotFoundError, ToolkitError: it is neither; what it is instead.
    """
    size, start = beginning_of(source, "a file of torch.save")
    if format_of_beginning(size, start) != "torch":
        raise ToolkitError("does not begin as a file of torch.save", where=str(source), fix="name another file")
    if not start.startswith(ZIP):
        return False
    if not zipfile.is_zipfile(source):
        raise ToolkitError(
            "was cut: its end, which says what is in it, is not there", where=str(source), fix=FETCH_AGAIN
        )
    return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _part(state: Any, only: str, source: Path, above: str = "") -> Any:
    """The part of a nested state that `only` names, below `above`; keys may have dots of their own."""
    if not isinstance(state, dict):
        raise ToolkitError(
            f"holds a {type(state).__name__} and no dict", where=str(source), fix="save a dict of names and tensors"
        )
    if not only:
        return state
    for key, value in state.items():
        if str(key) == only:
            if not isinstance(value, (dict, list)):
                kind = type(value).__name__
                raise ToolkitError(f"{above}{only} is one {kind}, and no part", where=str(source), fix=_TAKE_MORE)
            return value
        if only.startswith(f"{key}.") and isinstance(value, dict):
            return _part(value, only.removeprefix(f"{key}."), source, f"{above}{key}.")
    names = {str(key): value for key, value in state.items()}
    below = {name.removeprefix(f"{only}."): value for name, value in names.items() if name.startswith(f"{only}.")}
    if not below:
        known = ", ".join(f"{above}{name}" for name in list(names)[:20])
        raise ToolkitError(f"holds nothing below {above + only!r}", where=str(source), fix=f"choose one of: {known}")
    return below


def _new_tensor(tensor: torch.Tensor, path: tuple[str | int, ...], key: str, source: Path) -> NewTensor:
    # A nested tensor may well say that it is strided, and has no shape to ask for.
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type != "cpu":
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ToolkitError(
            f"{key} is no plain tensor ({layout}, {dtype_name(tensor.dtype)}, {tensor.device})",
            where=str(source),
            fix="make it a dense tensor with data, and save again",
        )
    check_dimensions(tensor.shape, f"{source}: {key}")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # memory that no file holds
        raise ToolkitError(
            f"{key} of shape {list(tensor.shape)} repeats the few bytes that are stored",
            where=str(source),
            fix="call .contiguous() on it, and save again",
        )

    def pieces() -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        yield (0,) * tensor.dim(), as_numpy(tensor, key)

    return NewTensor(dtype_name(tensor.dtype), tuple(tensor.shape), path, pieces)


def _new_dcp_tensor(folder: Path, name: str, tensor: StoredTensor) -> NewTensor:
    check_dimensions(tensor.shape, f"{folder}: {name}")
    return NewTensor(tensor.dtype, tensor.shape, tensor.path, partial(_dcp_pieces, folder, name, tensor))


def _dcp_pieces(folder: Path, name: str, tensor: StoredTensor) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    for offset, shape, item in tensor.pieces:
        piece = _dcp_item(folder, name, item)
        if not _is_tensor(piece) or piece.is_nested or (dtype_name(piece.dtype), piece.shape) != (tensor.dtype, shape):
            raise ToolkitError(
                f"holds something else than the piece of {name} at {list(offset)}",
                where=str(folder / item.file),
                fix="save it again",
            )
        ((_, array),) = _new_tensor(piece, (name,), name, folder / item.file).pieces()
        yield offset, array


def _dcp_item(folder: Path, name: str, item: StoredItem) -> Any:
    with reading_source(folder / item.file), (folder / item.file).open("rb") as file:
        file.seek(item.begin)
        content = io.BytesIO(file.read(item.length))
    where = f"{folder / item.file}: {name}"
    if zipfile.is_zipfile(content):
        _refuse_compressed(content, where)
    content.seek(0)
    return _loaded(partial(torch.load, content), where)


def _refuse_compressed(source: Path | io.BytesIO, where: str) -> None:
    """A few bytes that unpack to terabytes. Torch itself writes without compression."""
    with zipfile.ZipFile(source) as archive:
        packed = any(
            entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size
            for entry in archive.infolist()
        )
    if packed:
        raise ToolkitError("is compressed, which torch never does", where=where, fix="write it with torch.save")


def _loaded(load: Callable[..., Any], where: str) -> Any:
    try:
        loaded = load(map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises almost anything for a broken file
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which seeks in a broken file give
            raise
        plain = "save the state dict alone, of tensors, numbers, text, lists and dicts"
        if asked := re.search(r"GLOBAL (\S+)", str(error)):
            why, fix = f"it asks for {asked.group(1)}", plain
        else:
            why, fix = f"it is damaged, or holds something else ({_reason(error)})", f"{FETCH_AGAIN}, or {plain}"
        raise ToolkitError(f"cannot be read as tensors and plain values: {why}", where=where, fix=fix) from None
    refuse_unfolding(loaded, where)
    return loaded


def _reason(error: Exception) -> str:
    """The first sentence of torch's own text, which begins with advice to trust the file."""
    text = str(error)
    told = text.partition("WeightsUnpickler error:")[2].strip() or text
    return f"{type(error).__name__}: {told.splitlines()[0].partition('. ')[0] if told else ''}"[:120].removesuffix(": ")
