"""Compare the names and shapes in a checkpoint with those of a job, and report all differences at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.checkpoint.loading.planner import both_shapes, difference
from toolkit.errors import NotFoundError, ToolkitError

T = TypeVar("T")
Shape = tuple[int, ...] | None  # None for a value that is not a tensor


@dataclass(frozen=True)
class Stored:
    """The names in a checkpoint, each with its global shape."""

    folder: Path
    step: int
    shapes: dict[str, Shape]

    @classmethod
    def of(cls, folder: Path) -> Stored:
        """Return the names in the manifest of a checkpoint.

        Raises:
            CorruptCheckpointError, NotFoundError: the manifest is damaged; the folder does not exist.
        """
        if not folder.is_dir():
            raise NotFoundError("not a checkpoint folder", where=str(folder), fix="pass an existing step-… folder")
        manifest = read_manifest(folder)
        shapes: dict[str, Shape] = {name: record.shape for name, record in manifest.tensors.items()}
        return cls(folder, manifest.step, shapes | dict.fromkeys(manifest.objects))

    def below(self, key: str) -> dict[str, Shape]:
        """Return the entries below a key, by the rest of their names."""
        return {name[len(key) + 1 :]: shape for name, shape in self.shapes.items() if name.startswith(f"{key}.")}


def left_over(stored: Stored, tensors: Mapping[str, Any], wanted: Collection[str]) -> list[str]:
    """Return the parameters without optimizer state in the checkpoint.

    Args:
        tensors: the tensors that this rank loaded.
        wanted: the names of all values that any rank can load.

    Raises:
        ToolkitError: the checkpoint has model or optimizer state that this job cannot load, or lacks part of a
            parameter's optimizer state.
    """
    keys = ["model", "optimizer", *(f"modules.{name}" for name in tensors["modules"])]
    found = [f"{key}.{name}" for key in keys for name in stored.below(key)]
    extra = [name for name in found if not _is_below(name, wanted)]
    there = {prefix for name in found for prefix in _prefixes(name)}
    unfilled, partly = [], []
    for name, entries in tensors["optimizer"].items():
        absent = [entry for entry in names_of({f"optimizer.{name}": entries}) if entry not in there]
        if entries and len(absent) == len(list(names_of(entries))):
            unfilled.append(name)
        else:
            partly += absent
    if extra or partly:
        raise ToolkitError(
            difference(lacking=partly, extra=extra),
            where=str(stored.folder),
            fix="resume with the model and the optimizer that were saved, or start a run with only its weights "
            '(set checkpoint.source and checkpoint.take = "weights")',
        )
    return unfilled


def check_weights(stored: Stored, wanted: Mapping[str, Shape], without: Sequence[str]) -> None:
    """Compare a model's tensors with those of a checkpoint, except the names in `without` and all below them.

    Raises:
        ToolkitError: tensors are missing, unknown or of another shape (the error lists the first ones), or a name in
            `without` is neither in the model nor in the checkpoint.
    """
    found = stored.below("model")
    if not found:
        raise ToolkitError(
            "expected tensors below `model`, got none", where=str(stored.folder), fix="pass a TrainingState checkpoint"
        )
    idle = [name for name in without if not any(_is_below(one, {name}) for one in (*found, *wanted))]
    if idle:
        raise ToolkitError(
            f"neither this model nor {stored.folder} has {', '.join(idle)}",
            where="checkpoint.without",
            fix="use names of tensors or modules as in the model: head, or blocks.0.up.weight",
        )
    wanted, found = without_names(wanted, without), without_names(found, without)
    lacking, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    differing = [
        both_shapes(name, found[name], wanted[name])
        for name in sorted(wanted.keys() & found.keys())
        if wanted[name] != found[name]
    ]
    if lacking or extra or differing:
        raise ToolkitError(
            difference(lacking, extra, differing),
            where=str(stored.folder),
            fix="set checkpoint.without to the tensors that keep this job's values",
        )


def without_names(values: Mapping[str, T], without: Sequence[str]) -> dict[str, T]:
    """Return `values` without these names and all below them."""
    return {name: value for name, value in values.items() if not _is_below(name, without)}


def refuse_tied(values: Mapping[str, Any], taken: Collection[str]) -> None:
    """Reject tensors in `without` that share memory with tensors to load.

    Raises:
        ToolkitError: a tensor shares memory, for example a head that is tied to the embedding.
    """
    places = {place: name for name in taken if (place := _memory(values[name]))}
    for name in values.keys() - taken:
        if (other := places.get(_memory(values[name]))) is not None:
            raise ToolkitError(
                f"{name} shares its memory with {other}, which is loaded",
                where="checkpoint.without",
                fix=f"add {other} to checkpoint.without, or untie the two tensors",
            )


def _memory(value: Any) -> int:
    """Return the address of a tensor's local shard; 0 if it has none."""
    if not isinstance(value, Tensor):
        return 0
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() if local.numel() else 0


def shapes_of(values: Mapping[str, Any]) -> dict[str, Shape]:
    """Return global shapes by name."""
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in values.items()}


def names_of(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Return the names of all values in nested dicts, as in a checkpoint."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from names_of(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def _is_below(name: str, keys: Collection[str]) -> bool:
    return any(prefix in keys for prefix in _prefixes(name))


def _prefixes(name: str) -> Iterator[str]:
    """Yield `a.b.c`, `a.b`, `a` for `a.b.c`."""
    while name:
        yield name
        name = name.rpartition(".")[0]
