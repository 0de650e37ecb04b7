"""Exports the adapters of a checkpoint in peft's format, or merged into the weights of their base."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.contents.stored_tensors import StoredTensors, as_numbers
from toolkit.checkpoint.convert.base_weights import BaseWeights
from toolkit.checkpoint.convert.destination import new_file, new_files
from toolkit.checkpoint.convert.export_safetensors import StoredTensor, convert, write_file
from toolkit.checkpoint.convert.selection import Chosen, ExportRequest
from toolkit.errors import ToolkitError

__all__ = ["CONFIG", "PREFIX", "WEIGHTS", "export_merged", "export_peft"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_ENDS = (".lora_A", ".lora_B")


def export_peft(request: ExportRequest, dtype: str | None = None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into a folder.

    Raises:
        CorruptCheckpointError: a block of the checkpoint is damaged.
        ToolkitError: the checkpoint has no adapters, or the destination exists.
    """
    adapters = _adapters(request)
    tensors = [
        StoredTensor.of(request.manifest, Chosen(one.key, _name_in_peft(one.name), one.path), dtype)
        for one in request.selection.tensors
    ]
    with (
        StoredTensors(request.folder, request.manifest) as stored,
        new_files(request.destination, (CONFIG, WEIGHTS), replace=request.replace, last=(CONFIG,)) as part,
    ):
        request.before_reading()
        write_file(part / WEIGHTS, tensors, stored)
        (part / CONFIG).write_text(json.dumps(_config(adapters), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export_merged(request: ExportRequest, dtype: str | None = None) -> None:
    """Write the base of the checkpoint with the adapters added, in the base's types, as one safetensors file.

    Raises:
        CorruptCheckpointError: a block of the checkpoint is damaged.
        ToolkitError: the checkpoint has no adapters, or their base is missing or has changed.
    """
    adapters = _adapters(request)
    if not (path := adapters["base"]["path"]):
        raise ToolkitError(
            "the base of these adapters has the initial values of the job, which only the job can compute",
            where=str(request.folder),
            fix="train with adapters.base, or merge in Python with toolkit.train.adapters.files.merge",
        )
    base = BaseWeights(Path(path))
    if base.digest() != adapters["base"]["digest"]:
        raise ToolkitError(
            "is not the base on which the adapters were trained: its contents have changed",
            where=path,
            fix="restore the files that this folder had at the time of the training",
        )
    with (
        StoredTensors(request.folder, request.manifest) as stored,
        new_file(request.destination, replace=request.replace) as part,
    ):
        request.before_reading()
        merged = _Merged(base, stored, adapters)
        write_file(part, merged.tensors(dtype), merged)


class _Merged:
    """The tensors of a base with adapters added; reads as `StoredTensors` does."""

    def __init__(self, base: BaseWeights, stored: StoredTensors, adapters: dict[str, Any]) -> None:
        self._base, self._stored = base, stored
        rank = adapters["rank"]
        self._factor = adapters["alpha"] / (sqrt(rank) if adapters["rank_stabilized"] else rank)
        self._layers = {f"{name}.weight": f"model.{name}" for name in adapters["targets"]}
        self._last: tuple[str, np.ndarray] = ("", np.empty(0))

    def tensors(self, dtype: str | None) -> list[StoredTensor]:
        own = {key.removeprefix("model."): key for key in self._stored.manifest.tensors if key.startswith("model.")}
        names = [*self._base.records, *(name for name in own if name not in self._base.records)]
        found = []
        for name in names:
            if not name.endswith(_ENDS):
                record = self._base.records.get(name) or self._stored.manifest.tensors[own[name]]
                wanted = dtype if dtype and "float" in record.dtype else record.dtype
                found.append(StoredTensor(Chosen(name, name, (name,)), record.dtype, wanted, tuple(record.shape)))
        return found

    def box(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        if self._last[0] != name:
            self._last = (name, self._whole(name))
        return self._last[1][tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))]

    def _whole(self, name: str) -> np.ndarray:
        if f"model.{name}" in self._stored.manifest.tensors:  # trained whole
            own = self._stored.manifest.tensors[f"model.{name}"].dtype
            wanted = self._base.records[name].dtype if name in self._base.records else own
            return convert(self._stored.read(f"model.{name}"), own, wanted, name)
        if name not in self._layers:
            return self._base.read(name)
        low, high = (self._numbers(self._layers[name] + end) for end in _ENDS)
        total = self._base.numbers(name) + np.float32(self._factor) * (high @ low)
        return convert(total, str(total.dtype), self._base.records[name].dtype, name)

    def _numbers(self, key: str) -> np.ndarray:
        return as_numbers(self._stored.manifest.tensors[key].dtype, self._stored.read(key))


def _adapters(request: ExportRequest) -> dict[str, Any]:
    adapters: dict[str, Any] | None = request.manifest.state.get("extra", {}).get("adapters")
    if adapters is None:
        raise ToolkitError(
            "the checkpoint has no adapters",
            where=str(request.folder),
            fix="export a run with adapters.rank > 0, or use --format safetensors",
        )
    return adapters


def _name_in_peft(name: str) -> str:
    return f"{PREFIX}{name}.weight" if name.endswith(_ENDS) else f"{PREFIX}{name}"


def _config(adapters: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that peft needs to apply the adapters to the model."""
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": adapters["base"]["path"] or None,
        "r": adapters["rank"],
        "lora_alpha": adapters["alpha"],
        "use_rslora": adapters["rank_stabilized"],
        "lora_dropout": adapters["dropout"],
        "target_modules": adapters["targets"],
        "modules_to_save": adapters["modules_to_save"] or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
    }
