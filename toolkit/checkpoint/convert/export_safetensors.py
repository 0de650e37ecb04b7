"""Exports the tensors of a checkpoint as safetensors files, with the layout and names that Hugging Face expects.

The safetensors library can write only tensors that are all in memory. So toolkit itself writes the documented header,
copies verified slices from the shard files, and lets the library check the finished file.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.contents.stored_tensors import StoredTensors, runs
from toolkit.checkpoint.contents.tensor_tree import in_order
from toolkit.checkpoint.convert.destination import new_file, new_files
from toolkit.checkpoint.convert.import_safetensors import CODES, SLICE_BYTES, import_library, read_header
from toolkit.checkpoint.convert.selection import Chosen, ExportRequest, in_groups
from toolkit.checkpoint.convert.source_files import LENGTH
from toolkit.checkpoint.format.elements import element
from toolkit.errors import ToolkitError

__all__ = [
    "CONVERTIBLE", "StoredTensor", "convert", "export_safetensors", "files_beside", "tensors_of", "write_file", "write_model",
]  # fmt: skip

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAMES = (SINGLE, INDEX, "model-*-of-*.safetensors")
_METADATA = {"format": "pt"}  # transformers rejects files without the name of a framework
_BESIDE = (".json", ".jinja", ".model", ".txt")
_OWN_KEY = "__metadata__"
_DATA_ALIGNMENT = 8
CONVERTIBLE = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to export, and the type to which it is rounded."""

    chosen: Chosen
    stored_dtype: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * element(self.dtype).size_bytes


def export_safetensors(request: ExportRequest, dtype: str | None = None, most_shard_bytes: int = 5_000_000_000) -> None:
    """Write the selected tensors into a folder, or into one file if the destination's name ends in `.safetensors`.

    A folder with a whole model of transformers also gets its configuration and tokenizer, so that transformers can open it.

    Args:
        dtype: the type to which floating-point tensors are rounded, as in `convert`.
        most_shard_bytes: the size limit of each file in a folder; a larger tensor gets a file of its own.

    Raises:
        CorruptCheckpointError: a block of the checkpoint is damaged.
        ToolkitError: safetensors cannot represent a tensor, or the destination exists.
        OwnFailureError: the disk is full.
    """
    import_library()
    tensors = tensors_of(request, dtype)
    with StoredTensors(request.folder, request.manifest) as stored:
        write_model(request, tensors, stored, most_shard_bytes, _files_of_model(request))


def _files_of_model(request: ExportRequest) -> list[Path]:
    extra = request.manifest.state.get("extra", {})
    is_whole = request.selection.prefix == "model" and "adapters" not in extra
    if "transformers" not in extra or not is_whole or request.destination.suffix == ".safetensors":
        return []
    folder = Path(extra["transformers"]["folder"])
    if not folder.is_dir():
        message = "not found, but an export needs the configuration and tokenizer of the model from it"
        raise ToolkitError(message, where=str(folder), fix="restore it, or export into one file, such as x.safetensors")
    return files_beside(folder)


def files_beside(folder: Path) -> list[Path]:
    """Return the files beside the weights in a folder of transformers."""
    inside = (one for one in sorted(folder.iterdir()) if one.suffix in _BESIDE and one.is_file())
    return [one for one in inside if not one.name.endswith(".index.json")]


def write_model(
    request: ExportRequest,
    tensors: Sequence[StoredTensor],
    stored: StoredTensors,
    most: int,
    beside: Sequence[Path] = (),
) -> None:
    """Write the file of the request, or its folder of files of at most `most` bytes, with copies of the files `beside`."""
    if request.destination.suffix == ".safetensors":
        with new_file(request.destination, replace=request.replace) as path:
            request.before_reading()
            write_file(path, tensors, stored)
        return
    shards, names = _named_shards(tensors, most), (*_NAMES, *(one.name for one in beside))
    with new_files(request.destination, names, replace=request.replace, last=(SINGLE, INDEX)) as part:
        request.before_reading()
        for name, members in shards.items():
            write_file(part / name, members, stored)
        if len(shards) > 1:
            total = sum(tensor.size_bytes for tensor in tensors)
            (part / INDEX).write_text(_index(shards, total), encoding="utf-8")
        for one in beside:
            shutil.copyfile(one, part / one.name)


def tensors_of(
    request: ExportRequest, dtype: str | None, named: Callable[[str], str] = lambda name: name
) -> list[StoredTensor]:
    """Return the tensors to export in natural order of their names, in which layer 10 follows layer 9."""
    tensors = []
    for chosen in sorted(request.selection.tensors, key=lambda one: in_order(one.name)):
        record = request.manifest.tensors[chosen.key]
        _refuse_unfit(record.dtype, chosen.key, chosen.name)
        wanted = dtype if dtype and record.dtype in CONVERTIBLE else record.dtype
        tensors.append(StoredTensor(replace(chosen, name=named(chosen.name)), record.dtype, wanted, record.shape))
    if not tensors:
        fix = "choose another part with --only"
        raise ToolkitError("the selected part contains no tensors", where=str(request.folder), fix=fix)
    return tensors


def _refuse_unfit(dtype: str, key: str, name: str) -> None:
    """Raise a ToolkitError for an element type or a name that a safetensors file cannot contain."""
    if name == _OWN_KEY or any("\ud800" <= character <= "\udfff" for character in name):
        fix = "rename this tensor, or exclude it with --only"
        raise ToolkitError(f"safetensors cannot contain a tensor named {name!r:.80}", fix=fix)
    if dtype not in CODES:
        fix = "exclude this tensor with --only, or export with --format torch or dcp"
        raise ToolkitError(f"safetensors cannot contain elements of type {dtype}", where=key, fix=fix)


def _named_shards(tensors: Sequence[StoredTensor], most_bytes: int) -> dict[str, list[StoredTensor]]:
    shards = in_groups(tensors, lambda tensor: tensor.size_bytes, most_bytes)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, start=1)
    }


def _index(shards: Mapping[str, Sequence[StoredTensor]], total: int) -> str:
    weight_map = {tensor.chosen.name: name for name, members in shards.items() for tensor in members}
    body = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def _encode_header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Return the header of a file that contains `tensors` (name: element type, shape) in this order without gaps."""
    header: dict[str, Any] = {_OWN_KEY: _METADATA}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + prod(shape) * element(dtype, where=name).size_bytes
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _DATA_ALIGNMENT)
    return LENGTH.pack(len(encoded)) + encoded


def write_file(path: Path, tensors: Sequence[StoredTensor], stored: StoredTensors) -> None:
    """Write a new safetensors file, whose header the library checks."""
    # Types with the largest elements first, as the library does, so that each tensor is aligned to its element size.
    ordered = sorted(tensors, key=lambda tensor: -element(tensor.dtype).size_bytes)
    described = {tensor.chosen.name: (tensor.dtype, tensor.shape) for tensor in ordered}
    with path.open("xb") as file:
        file.write(_encode_header(described))
        for tensor in ordered:
            for offset, shape in runs(tensor.shape, element(tensor.stored_dtype).size_bytes, SLICE_BYTES):
                array = stored.box(tensor.chosen.key, offset, shape)
                if tensor.dtype != tensor.stored_dtype:
                    array = convert(array, tensor.stored_dtype, tensor.dtype, tensor.chosen.key)
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    read_header(path)


def convert(array: np.ndarray, dtype: str, wanted: str, name: str) -> np.ndarray:
    """Round numbers of type `dtype` to type `wanted`: to nearest, ties to even. Arrays have the `Element.memory` type.

    As in torch, float64 is rounded to float32 before a 16-bit type. Raises ToolkitError if a number is too large.
    """
    if dtype == wanted:
        return array
    numbers = _from_bfloat16(array) if dtype == "bfloat16" else array
    with np.errstate(over="ignore"):
        single = numbers.astype("<f4")
        result = _to_bfloat16(single) if wanted == "bfloat16" else single.astype(wanted)
    shown = _from_bfloat16(result) if wanted == "bfloat16" else result
    lost = np.isinf(shown) & np.isfinite(numbers)
    if lost.any():
        raise ToolkitError(
            f"contains {numbers[lost][0]:g}, which is too large for {wanted}",
            where=name,
            fix="choose another --dtype, or omit --dtype",
        )
    return result


def _from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("<u4") << 16).view("<f4")


def _to_bfloat16(single: np.ndarray) -> np.ndarray:
    """Round each float32 to its upper 16 bits."""
    bits = single.view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype("<u2")
