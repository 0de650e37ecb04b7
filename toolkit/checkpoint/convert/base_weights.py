"""Reads single tensors of a checkpoint or of safetensors, as numbers, for a model that starts from them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from toolkit.checkpoint.contents.stored_tensors import StoredTensors, as_numbers
from toolkit.checkpoint.convert.import_safetensors import read_safetensors
from toolkit.checkpoint.convert.lone_writer import NewTensor
from toolkit.checkpoint.format.elements import element
from toolkit.checkpoint.format.layout import MANIFEST
from toolkit.checkpoint.format.manifest import TensorRecord
from toolkit.checkpoint.format.manifest_file import read_manifest

__all__ = ["BaseWeights"]

_MODEL = "model."
_END_BYTES = 2**20


class BaseWeights:
    """The model of a checkpoint folder, or the tensors of a safetensors file or folder.

    `records` has the type and shape of each tensor by its name in the model. Raises ToolkitError if `source` is neither.
    """

    def __init__(self, source: Path) -> None:
        self._stored: StoredTensors | None = None
        if (source / MANIFEST).is_file():
            manifest = read_manifest(source)
            self._stored = StoredTensors(source, manifest)
            found: Mapping[str, TensorRecord | NewTensor] = {
                key.removeprefix(_MODEL): record for key, record in manifest.tensors.items() if key.startswith(_MODEL)
            }
            files = [source / MANIFEST]
        else:
            found = read_safetensors(source)
            files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
        self.source, self.records = source, dict(found)
        self._files = files

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor with the `memory` type of its element; a checkpoint's blocks are verified."""
        record = self.records[name]
        if isinstance(record, TensorRecord):
            assert self._stored is not None
            return self._stored.read(f"{_MODEL}{name}")
        whole = np.empty(record.shape, element(record.dtype).memory)
        flat, filled = whole.reshape(-1), 0
        for _, part in record.pieces():  # in C order without gaps
            flat[filled : filled + part.size] = part.reshape(-1)
            filled += part.size
        return whole

    def numbers(self, name: str) -> np.ndarray:
        """Return a whole tensor in a type that numpy can compute with."""
        return as_numbers(self.records[name].dtype, self.read(name))

    def digest(self) -> str:
        """Return a digest of the manifest, which has the digests of all shards, or of the ends of safetensors files."""
        digest = hashlib.sha256()
        for file in self._files:
            size = file.stat().st_size
            with file.open("rb") as opened:
                digest.update(size.to_bytes(8, "little") + opened.read(_END_BYTES))
                opened.seek(max(0, size - _END_BYTES))
                digest.update(opened.read(_END_BYTES))
        return digest.hexdigest()
