"""A checkpoint's tensors as safetensors files, laid out and named as Hugging Face's libraries expect them.

Neither torch nor the whole of a tensor is needed: verified slices go straight from the shard files into the new ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from toolkit.checkpoint.contents.keys import in_order
from toolkit.checkpoint.contents.stored_tensors import StoredTensors, runs
from toolkit.checkpoint.convert.destination import new_file, new_files
from toolkit.checkpoint.convert.rounding import convert, converted_dtype
from toolkit.checkpoint.convert.safetensors_header import (
    encode_header,
    import_library,
    read_header,
    refuse_unfit_tensor,
)
from toolkit.checkpoint.convert.selection import Chosen, Selection, in_groups
from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.errors import ToolkitError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAMES = (SINGLE, INDEX, "model-*-of-*.safetensors")
_METADATA = {"format": "pt"}  # transformers rejects files that do not name a framework
_SLICE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class _Tensor:
    chosen: Chosen
    stored_dtype: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * element(self.dtype).size_bytes


def export_safetensors(
    folder: Path,
    manifest: Manifest,
    selection: Selection,
    destination: Path,
    *,
    dtype: str | None = None,
    most_shard_bytes: int = 5_000_000_000,
    replace: bool = False,
    before_reading: Callable[[], None] = lambda: None,
) -> None:
    """Write the selected tensors into the folder `destination`, or into one file if its name ends in `.safetensors`.

    Args:
        dtype: floating-point tensors are rounded to this type; see `rounding`.
        most_shard_bytes: the size limit of each file of a folder; a larger tensor gets a file of its own.
        replace: whether to replace an earlier export.
        before_reading: called after all checks, before the first tensor is read.

    Raises:
        CorruptCheckpointError: a block of the checkpoint is damaged.
        ToolkitError: this format cannot represent a tensor, or the destination exists.
        OwnFailureError: the disk is full.
    """
    import_library()
    tensors = _tensors(manifest, selection, dtype, where=str(folder))
    total = sum(tensor.size_bytes for tensor in tensors)
    with StoredTensors(folder, manifest) as stored:
        if destination.suffix == ".safetensors":
            with new_file(destination, replace=replace) as path:
                before_reading()
                _write_file(path, tensors, stored)
            return
        shards = _named_shards(tensors, most_shard_bytes)
        with new_files(destination, _NAMES, replace=replace, last=(SINGLE, INDEX)) as part:
            before_reading()
            for name, members in shards.items():
                _write_file(part / name, members, stored)
            if len(shards) > 1:
                (part / INDEX).write_text(_index(shards, total), encoding="utf-8")


def _tensors(manifest: Manifest, selection: Selection, dtype: str | None, *, where: str) -> list[_Tensor]:
    """The tensors in natural order of their names: layer 10 follows layer 9."""
    tensors = []
    for chosen in sorted(selection.tensors, key=lambda one: in_order(one.name)):
        record = manifest.tensors[chosen.key]
        refuse_unfit_tensor(record.dtype, chosen.key, chosen.name)
        tensors.append(_Tensor(chosen, record.dtype, converted_dtype(record.dtype, dtype), record.shape))
    if not tensors:
        raise ToolkitError("contains no tensors in this part", where=where, fix="choose another part with --only")
    return tensors


def _named_shards(tensors: Sequence[_Tensor], most_bytes: int) -> dict[str, list[_Tensor]]:
    shards = in_groups(tensors, lambda tensor: tensor.size_bytes, most_bytes)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, start=1)
    }


def _index(shards: Mapping[str, Sequence[_Tensor]], total: int) -> str:
    weight_map = {tensor.chosen.name: name for name, members in shards.items() for tensor in members}
    body = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def _write_file(path: Path, tensors: Sequence[_Tensor], stored: StoredTensors) -> None:
    # The largest elements first, as in the library's files: this aligns each tensor to the size of its elements.
    ordered = sorted(tensors, key=lambda tensor: -element(tensor.dtype).size_bytes)
    described = {tensor.chosen.name: (tensor.dtype, tensor.shape) for tensor in ordered}
    with path.open("xb") as file:
        file.write(encode_header(described, _METADATA))
        for tensor in ordered:
            for offset, shape in runs(tensor.shape, element(tensor.stored_dtype).size_bytes, _SLICE_BYTES):
                array = stored.box(tensor.chosen.key, offset, shape)
                if tensor.dtype != tensor.stored_dtype:
                    array = convert(array, tensor.stored_dtype, tensor.dtype, tensor.chosen.key)
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    read_header(path)
