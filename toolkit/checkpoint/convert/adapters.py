"""Reads the base of adapters, and exports adapters in peft's format or merged into the weights of their base."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.contents.stored_tensors import StoredTensors, as_numbers
from toolkit.checkpoint.convert import export_safetensors as safetensors
from toolkit.checkpoint.convert.destination import new_files
from toolkit.checkpoint.convert.export_safetensors import CONVERTIBLE, StoredTensor, convert, tensors_of, write_file
from toolkit.checkpoint.convert.import_safetensors import read_safetensors
from toolkit.checkpoint.convert.lone_writer import NewTensor
from toolkit.checkpoint.convert.selection import Chosen, ExportRequest
from toolkit.checkpoint.format.layout import MANIFEST
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError

__all__ = ["CONFIG", "ENDS", "PREFIX", "WEIGHTS", "BaseWeights", "export_merged", "export_peft"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = (".lora_A", ".lora_B")
_OWN_NAMES = {
    "r": "rank", "lora_alpha": "alpha", "use_rslora": "rank_stabilized", "lora_dropout": "dropout",
    "target_modules": "targets", "modules_to_save": "modules_to_save"
}  # fmt: skip
_MODEL, _BASE = "model.", "base."  # of keys: of the checkpoint, and of merged tensors
_END_BYTES = 2**20


class BaseWeights:
    """The model of a checkpoint folder, or the tensors of a safetensors file or folder, as `records` by name."""

    def __init__(self, source: Path) -> None:
        """Read the names and shapes. Raises ToolkitError if `source` is neither."""
        self.source = source
        self.records: dict[str, NewTensor] = {}
        self._files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
        if not (source / MANIFEST).is_file():
            self.records = read_safetensors(source)
            return
        self._files, manifest = [source / MANIFEST], read_manifest(source)
        self._stored = StoredTensors(source, manifest)
        for key, one in manifest.tensors.items():
            if key.startswith(_MODEL):
                name = key.removeprefix(_MODEL)
                read = partial(self._stored.box, key)
                self.records[name] = NewTensor(one.dtype, one.shape, one.path, tuple, read)

    def read(self, name: str, offset: Sequence[int] = (), shape: Sequence[int] | None = None) -> np.ndarray:
        """Return a tensor, or its part at `offset`, with the `memory` type of its element; checkpoints are verified."""
        record = self.records[name]
        assert record.box is not None
        return record.box(offset or (0,) * len(record.shape), record.shape if shape is None else shape)

    def numbers(self, name: str, offset: Sequence[int] = (), shape: Sequence[int] | None = None) -> np.ndarray:
        """Return a tensor or a part of it in a type that numpy can compute with."""
        return as_numbers(self.records[name].dtype, self.read(name, offset, shape))

    @cached_property
    def digest(self) -> str:
        """A digest of the manifest, which has the digests of all shards, or of the ends of the safetensors files."""
        digest = hashlib.sha256()
        for file in self._files:
            size = file.stat().st_size
            with file.open("rb") as opened:
                digest.update(size.to_bytes(8, "little") + opened.read(_END_BYTES))
                opened.seek(max(0, size - _END_BYTES))
                digest.update(opened.read(_END_BYTES))
        return digest.hexdigest()


def export_peft(request: ExportRequest) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into a folder; raises as `export_safetensors`."""
    adapters = _adapters(request)
    config = {"peft_type": "LORA", "task_type": None, "bias": "none", "fan_in_fan_out": False, "inference_mode": True}
    config |= {name: adapters[own] for name, own in _OWN_NAMES.items()}
    config["base_model_name_or_path"] = adapters["base"]["path"] or None
    tensors = tensors_of(request, None, lambda name: f"{PREFIX}{name}{'.weight' if name.endswith(ENDS) else ''}")
    with (
        StoredTensors(request.folder, request.manifest) as stored,
        new_files(request.destination, (CONFIG, WEIGHTS), replace=request.replace, last=(CONFIG,)) as part,
    ):
        request.before_reading()
        write_file(part / WEIGHTS, tensors, stored)
        (part / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export_merged(request: ExportRequest, dtype: str | None, most_shard_bytes: int) -> None:
    """Write the base of the checkpoint with the adapters added, in the base's types: one safetensors file, or a folder.

    A folder also gets the configuration and the tokenizer of the base, so that transformers can open it.

    Raises a ToolkitError if the checkpoint has no adapters, or their base is missing or has changed.
    """
    adapters = _adapters(request)
    if not (path := adapters["base"]["path"]):
        message = "the base of these adapters has the initial values of the job, which only the job can compute"
        fix = "train with adapters.base, or finetune_lora with args.model; or merge in Python with toolkit.train.adapters.files.merge"
        raise ToolkitError(message, where=str(request.folder), fix=fix)
    base = BaseWeights(Path(path))
    if base.digest != adapters["base"]["digest"]:
        message = "is not the base on which the adapters were trained: its contents have changed"
        raise ToolkitError(message, where=path, fix="restore the files that it had at the time of the training")
    is_checkpoint = (base.source / MANIFEST).is_file()
    beside = safetensors.files_beside(base.source) if base.source.is_dir() and not is_checkpoint else ()
    merged = _Merged(request, base, adapters["factor"])
    with merged:
        safetensors.write_model(request, merged.tensors(dtype), merged, most_shard_bytes, beside)


class _Merged(StoredTensors):
    """Reads the tensors of a base with the adapters of a checkpoint added."""

    def __init__(self, request: ExportRequest, base: BaseWeights, factor: float) -> None:
        super().__init__(request.folder, request.manifest)
        self._base, self._factor = base, np.float32(factor)
        self._last = ("", np.empty(0))

    def tensors(self, dtype: str | None) -> list[StoredTensor]:
        own = {key.removeprefix(_MODEL): one for key, one in self.manifest.tensors.items() if key.startswith(_MODEL)}
        kinds = {name: (one.dtype, one.shape) for name, one in own.items() if not name.endswith(ENDS)}
        kinds |= {name: (one.dtype, one.shape) for name, one in self._base.records.items()}
        layers = [name.removesuffix(ENDS[0]) for name in own if name.endswith(ENDS[0])]
        if lacking := [name for name in layers if f"{name}.weight" not in kinds]:
            message = f"the base has no weight of {lacking[0]}, which is tied to another module"
            fix = "export the adapters with --format peft, or train without this layer in adapters.targets"
            raise ToolkitError(message, where=str(self._base.source), fix=fix)
        return [
            StoredTensor(Chosen(_BASE + name, name, (name,)), kind, (kind in CONVERTIBLE and dtype) or kind, shape)
            for name, (kind, shape) in kinds.items()
        ]

    def box(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        if not name.startswith(_BASE):
            return super().box(name, offset, shape)
        if self._last[0] != name:
            self._last = (name, self._merged(name.removeprefix(_BASE)))
        return self._last[1][tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))]

    def _merged(self, name: str) -> np.ndarray:
        stored, in_base = self.manifest.tensors, self._base.records.get(name)
        layer = f"model.{name.removesuffix('.weight')}"
        if f"model.{name}" in stored:  # trained whole
            kind = stored[f"model.{name}"].dtype
            return convert(self.read(f"model.{name}"), kind, in_base.dtype if in_base else kind, name)
        if in_base is None or f"{layer}.lora_A" not in stored:
            return self._base.read(name)
        low, high = (as_numbers(stored[layer + end].dtype, self.read(layer + end)) for end in ENDS)
        total = self._base.numbers(name) + self._factor * (high @ low)
        return convert(total, str(total.dtype), in_base.dtype, name)


def _adapters(request: ExportRequest) -> dict[str, Any]:
    adapters: dict[str, Any] | None = request.manifest.state.get("extra", {}).get("adapters")
    if adapters is None:
        fix = "export a run with adapters.rank > 0, or use --format safetensors"
        raise ToolkitError("the checkpoint has no adapters", where=str(request.folder), fix=fix)
    return adapters
