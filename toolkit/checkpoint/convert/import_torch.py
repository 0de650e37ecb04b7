"""Reads torch's own formats for an import: a `torch.save` file or a `dcp.save` folder. Runs no code from a pickle."""

import errno
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from toolkit.checkpoint.convert.dcp_metadata import StoredItem, StoredTensor, read_dcp_metadata
from toolkit.checkpoint.convert.lone_writer import NewTensor
from toolkit.checkpoint.convert.nesting import Omitted, joined, leaves, refuse_unfolding
from toolkit.checkpoint.convert.source_files import FETCH_AGAIN, ZIP, format_from_prefix, read_prefix, reading_source
from toolkit.checkpoint.format.manifest import ObjectRecord, check_dimensions
from toolkit.checkpoint.tensors import as_numpy, dtype_name
from toolkit.errors import ToolkitError

Contents = tuple[dict[str, NewTensor], dict[str, ObjectRecord]]


def read_torch(source: Path, only: str = "") -> Contents:
    """Return the tensors and values of a `torch.save` file. Tensors are read from the file only when they are written.

    `only` is the prefix of the keys to read, and is removed from them. Objects of numpy become `Omitted`. Raises
    ToolkitError if the file has another format, or contains other objects than tensors and plain values.
    """
    is_mapped = _is_zip(source)  # torch can only map zip files; older files are read into memory
    if is_mapped:
        _refuse_compressed(source, str(source))
    state = _load(partial(torch.load, source, mmap=is_mapped), str(source), source)
    tensors: dict[str, NewTensor] = {}
    values: dict[str, ObjectRecord] = {}
    for path, value in leaves(_part(state, only, source), _is_tensor, where=str(source)):
        key = joined(path)
        if key in tensors or key in values:
            raise ToolkitError(f"two values have the key {key}", where=str(source), fix="rename one of them")
        if _is_tensor(value):
            tensors[key] = _new_tensor(value, path, key, source)
        else:
            values[key] = ObjectRecord(path, value)
    return tensors, values


def read_dcp(source: Path) -> Contents:
    """Return the tensors and values of a `dcp.save` folder. Tensors are read piecewise, only when they are written.

    Raises ToolkitError for metadata that DCP does not write, or for values that are not plain.
    """
    tensors, values = read_dcp_metadata(source)
    return (
        {name: _new_dcp_tensor(source, name, tensor) for name, tensor in tensors.items()},
        {name: ObjectRecord(value.path, _load_item(source, name, value.item)) for name, value in values.items()},
    )


def _is_zip(source: Path) -> bool:
    """Return True for a torch.save file, False for an older one (torch < 1.6). Raises ToolkitError otherwise."""
    size, prefix = read_prefix(source, "a torch.save file")
    kind = format_from_prefix(size, prefix)
    if kind == "safetensors":
        raise ToolkitError("looks like a safetensors file", where=str(source), fix="pass --format safetensors")
    if kind != "torch":
        raise ToolkitError("does not look like a torch.save file", where=str(source), fix="pass another file")
    if not prefix.startswith(ZIP):
        return False
    if not zipfile.is_zipfile(source):
        raise ToolkitError(
            "is truncated: the zip central directory at its end is missing", where=str(source), fix=FETCH_AGAIN
        )
    return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _part(state: Any, only: str, source: Path, above: str = "") -> Any:
    """Return the part of a nested state at the key `only`, which may contain dots; messages start with `above`."""
    if not isinstance(state, dict):
        kind = type(state).__name__
        raise ToolkitError(f"expected a dict, got a {kind}", where=str(source), fix="save a dict of names and tensors")
    if not only:
        return state
    for key, value in state.items():
        if str(key) == only:
            if not isinstance(value, (dict, list)):
                kind = type(value).__name__
                fix = "pass the key of a dict or list to --only, or omit --only"
                raise ToolkitError(f"{above}{only} is a single {kind}, not a dict or list", where=str(source), fix=fix)
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
    # is_nested is checked, too, because a nested tensor may report a strided layout.
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type != "cpu":
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ToolkitError(
            f"{key} is not a dense tensor with data ({layout}, {dtype_name(tensor.dtype)}, {tensor.device})",
            where=str(source),
            fix="convert this tensor to a dense CPU tensor with data, and save the file again",
        )
    check_dimensions(tensor.shape, f"{source}: {key}")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # an expanded view could need far more memory than the file
        raise ToolkitError(
            f"{key} of shape {list(tensor.shape)} is an expanded view of fewer stored bytes",
            where=str(source),
            fix="call .contiguous() on this tensor, and save the file again",
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
            message = f"expected the piece of {name} at {list(offset)}, got other contents"
            raise ToolkitError(message, where=str(folder / item.file), fix="save the checkpoint again")
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
    return _load(partial(torch.load, content), f"{path}: {name}", content)


def _refuse_compressed(source: Path | io.BytesIO, where: str) -> None:
    """Raise a ToolkitError for a compressed zip, which could expand to terabytes. Torch never compresses its files."""
    with zipfile.ZipFile(source) as archive:
        is_compressed = any(
            entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size
            for entry in archive.infolist()
        )
    if is_compressed:
        message = "is a compressed zip file, which torch.save never writes and which could expand without limit"
        raise ToolkitError(message, where=where, fix="save the state again with torch.save")


def _load(load: Callable[..., Any], where: str, archive: Path | io.BytesIO) -> Any:
    try:
        with _without_numpy(archive):
            state = load(map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises almost anything for a broken file
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # seeks in a broken file raise EINVAL
            raise
        plain = "save only a state dict of tensors, numbers, strings, lists and dicts"
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            why, fix = f"the file contains {refused.group(1)}", plain
        else:
            why, fix = f"the file is damaged or contains other objects ({_reason(error)})", f"{FETCH_AGAIN}, or {plain}"
        raise ToolkitError(f"cannot be read as tensors and plain values: {why}", where=where, fix=fix) from None
    refuse_unfolding(state, where)
    return state


@contextmanager
def _without_numpy(archive: Path | io.BytesIO) -> Iterator[None]:
    """Let torch's restricted reader put `Omitted` in place of objects of numpy, such as the random states of trainers.

    It calls neither numpy nor any other class that the file names.
    """
    of_file = archive if isinstance(archive, Path) else io.BytesIO(archive.getvalue())  # with a position of its own
    names = get_unsafe_globals_in_checkpoint(of_file) if zipfile.is_zipfile(archive) else []
    if isinstance(archive, io.BytesIO):
        archive.seek(0)
    numpys = [name for name in names if name.partition(".")[0] == "numpy"]
    with safe_globals([(type("Omitted", (Omitted,), {"name": name}), name) for name in numpys]):
        yield


def _reason(error: Exception) -> str:
    """Return the first sentence of torch's own message, without its advice to trust the file."""
    message = str(error)
    message = message.partition("WeightsUnpickler error:")[2].strip() or message
    sentence = message.splitlines()[0].partition(". ")[0] if message else ""
    return f"{type(error).__name__}: {sentence}"[:120].removesuffix(": ")
