"""Torch's own files as a checkpoint: a file of `torch.save`, or a folder of `dcp.save`. No pickle runs code."""

import errno
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.checkpoint.convert.dcp_metadata import StoredItem, StoredTensor, read_dcp_metadata
from toolkit.checkpoint.convert.lone_writer import NewTensor
from toolkit.checkpoint.convert.nesting import joined, leaves, refuse_unfolding
from toolkit.checkpoint.convert.source_files import FETCH_AGAIN, ZIP, format_from_prefix, read_prefix, reading_source
from toolkit.checkpoint.format.manifest import ObjectRecord, check_dimensions
from toolkit.checkpoint.tensors import as_numpy, dtype_name
from toolkit.errors import ToolkitError

Contents = tuple[dict[str, NewTensor], dict[str, ObjectRecord]]


def read_torch(source: Path, only: str = "") -> Contents:
    """The tensors and values of a file of `torch.save`. Tensors stay in the file until they are written.

    `only` is the prefix of the keys to read, and is removed from them. Raises ToolkitError for a file of another
    format, or with other objects than tensors and plain values.
    """
    is_mapped = _is_zip(source)  # files older than torch 1.6 are read into memory
    if is_mapped:
        _refuse_compressed(source, str(source))
    state = _load(partial(torch.load, source, mmap=is_mapped), str(source))
    tensors: dict[str, NewTensor] = {}
    values: dict[str, ObjectRecord] = {}
    for path, value in leaves(_part(state, only, source), _is_tensor, where=str(source)):
        key = joined(path)
        if key in tensors or key in values:
            raise ToolkitError(f"two of its keys are {key}", where=str(source), fix="save it with other keys")
        if _is_tensor(value):
            tensors[key] = _new_tensor(value, path, key, source)
        else:
            values[key] = ObjectRecord(path, value)
    return tensors, values


def read_dcp(source: Path) -> Contents:
    """The tensors and values of a folder of `dcp.save`. Tensors are read one piece at a time, when they are written.

    Raises ToolkitError for metadata that DCP does not write, or for other values than plain ones.
    """
    tensors, values = read_dcp_metadata(source)
    return (
        {name: _new_dcp_tensor(source, name, tensor) for name, tensor in tensors.items()},
        {name: ObjectRecord(value.path, _load_item(source, name, value.item)) for name, value in values.items()},
    )


def _is_zip(source: Path) -> bool:
    """True for a file of torch.save, False for one older than torch 1.6; else an error that names the format."""
    size, prefix = read_prefix(source, "a file of torch.save")
    kind = format_from_prefix(size, prefix)
    if kind == "safetensors":
        raise ToolkitError("starts like a safetensors file", where=str(source), fix="pass --format safetensors")
    if kind != "torch":
        raise ToolkitError("does not start like a file of torch.save", where=str(source), fix="name another file")
    if not prefix.startswith(ZIP):
        return False
    if not zipfile.is_zipfile(source):
        raise ToolkitError(
            "is truncated: the table of contents at its end is missing", where=str(source), fix=FETCH_AGAIN
        )
    return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _part(state: Any, only: str, source: Path, above: str = "") -> Any:
    """The part of a nested state that `only` names, below `above`; keys may contain dots."""
    if not isinstance(state, dict):
        kind = type(state).__name__
        raise ToolkitError(f"expected a dict, got a {kind}", where=str(source), fix="save a dict of names and tensors")
    if not only:
        return state
    for key, value in state.items():
        if str(key) == only:
            if not isinstance(value, (dict, list)):
                kind = type(value).__name__
                fix = "select the part around it, or omit --only"
                raise ToolkitError(f"{above}{only} is a single {kind}, not a part", where=str(source), fix=fix)
            return value
        if only.startswith(f"{key}.") and isinstance(value, dict):
            return _part(value, only.removeprefix(f"{key}."), source, f"{above}{key}.")
    names = {str(key): value for key, value in state.items()}
    below = {name.removeprefix(f"{only}."): value for name, value in names.items() if name.startswith(f"{only}.")}
    if not below:
        known = ", ".join(f"{above}{name}" for name in list(names)[:20])
        raise ToolkitError(f"contains no keys below {above + only!r}", where=str(source), fix=f"choose one of: {known}")
    return below


def _new_tensor(tensor: torch.Tensor, path: tuple[str | int, ...], key: str, source: Path) -> NewTensor:
    # A nested tensor can report that it is strided, and has no shape.
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type != "cpu":
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ToolkitError(
            f"{key} is not a dense tensor with data ({layout}, {dtype_name(tensor.dtype)}, {tensor.device})",
            where=str(source),
            fix="make it a dense tensor with data, and save again",
        )
    check_dimensions(tensor.shape, f"{source}: {key}")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # memory that no file contains
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
        piece = _load_item(folder, name, item)
        if not _is_tensor(piece) or piece.is_nested or (dtype_name(piece.dtype), piece.shape) != (tensor.dtype, shape):
            message = f"contains something other than the piece of {name} at {list(offset)}"
            raise ToolkitError(message, where=str(folder / item.file), fix="save it again")
        ((_, array),) = _new_tensor(piece, (name,), name, folder / item.file).pieces()
        yield offset, array


def _load_item(folder: Path, name: str, item: StoredItem) -> Any:
    path = folder / item.file
    with reading_source(path), path.open("rb") as file:
        file.seek(item.begin)
        content = io.BytesIO(file.read(item.length))
    if zipfile.is_zipfile(content):
        _refuse_compressed(content, f"{path}: {name}")
    content.seek(0)
    return _load(partial(torch.load, content), f"{path}: {name}")


def _refuse_compressed(source: Path | io.BytesIO, where: str) -> None:
    """Refuse a zip that may unpack a few bytes to terabytes. Torch itself writes without compression."""
    with zipfile.ZipFile(source) as archive:
        is_compressed = any(
            entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size
            for entry in archive.infolist()
        )
    if is_compressed:
        raise ToolkitError("is compressed, unlike every file of torch", where=where, fix="write it with torch.save")


def _load(load: Callable[..., Any], where: str) -> Any:
    try:
        state = load(map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises almost anything for a broken file
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # seeks in a broken file raise EINVAL
            raise
        plain = "save only the state dict, of tensors, numbers, strings, lists and dicts"
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            why, fix = f"it contains {refused.group(1)}", plain
        else:
            why, fix = f"it is damaged or contains other objects ({_reason(error)})", f"{FETCH_AGAIN}, or {plain}"
        raise ToolkitError(f"cannot be read as tensors and plain values: {why}", where=where, fix=fix) from None
    refuse_unfolding(state, where)
    return state


def _reason(error: Exception) -> str:
    """The first sentence of torch's own message, without its leading advice to trust the file."""
    message = str(error)
    message = message.partition("WeightsUnpickler error:")[2].strip() or message
    sentence = message.splitlines()[0].partition(". ")[0] if message else ""
    return f"{type(error).__name__}: {sentence}"[:120].removesuffix(": ")
