"""Whether a checkpoint holds what a job has a place for: by name and shape, all that differs at once."""

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
        """Read the manifest.

        Raises:
            CorruptCheckpointError, NotFoundError: there is none that is good; there is no such folder.
        """
        if not folder.is_dir():
            raise NotFoundError("is not a checkpoint folder", where=str(folder), fix="name a step-… folder")
        manifest = read_manifest(folder)
        shapes: dict[str, Shape] = {name: record.shape for name, record in manifest.tensors.items()}
        return cls(folder, manifest.step, shapes | dict.fromkeys(manifest.objects))

    def below(self, key: str) -> dict[str, Shape]:
        """What stands below a key, by the rest of its name."""
        return {name[len(key) + 1 :]: shape for name, shape in self.shapes.items() if name.startswith(f"{key}.")}


def left_over(stored: Stored, tensors: Mapping[str, Any], wanted: Collection[str]) -> list[str]:
    """Compare what was loaded with what was there; the parameters whose optimizer state the checkpoint has not.

    Args:
        tensors: what this rank loaded.
        wanted: the names of all values that any rank has a place for.

    Raises:
        ToolkitError: the checkpoint holds model or optimizer state that this job has no place for, or lacks a part
            of what the optimizer keeps of a parameter.
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
            fix="resume with the model and the optimizer that were saved, or begin a run with its weights alone "
            '(checkpoint.source and checkpoint.take = "weights")',
        )
    return unfilled


def check_weights(stored: Stored, wanted: Mapping[str, Shape], without: Sequence[str]) -> None:
    """Compare a model's tensors with those of a checkpoint, but for the names in `without` and all below them.

    Raises:
        ToolkitError: with all that is missing, too much or of another shape, of many the first; when one of `without` names
            nothing on either side.
    """
    found = stored.below("model")
    if not found:
        raise ToolkitError(
            "holds no tensors below `model`", where=str(stored.folder), fix="name a checkpoint of a TrainingState"
        )
    idle = [name for name in without if not any(_is_below(one, {name}) for one in (*found, *wanted))]
    if idle:
        raise ToolkitError(
            f"neither this model nor {stored.folder} has {', '.join(idle)}",
            where="checkpoint.without",
            fix="name tensors or modules as the model does: head, or blocks.0.up.weight",
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
            fix="name what is to stay as this job makes it in checkpoint.without",
        )


def without_names(values: Mapping[str, T], without: Sequence[str]) -> dict[str, T]:
    """`values` but for these names and all below them."""
    return {name: value for name, value in values.items() if not _is_below(name, without)}


def refuse_tied(values: Mapping[str, Any], taken: Collection[str]) -> None:
    """What is to stay as the job made it must not be the same memory as what is taken.

    Raises:
        ToolkitError: it is, as a head is that shares its weights with the embedding.
    """
    places = {place: name for name in taken if (place := _memory(values[name]))}
    for name in values.keys() - taken:
        if (other := places.get(_memory(values[name]))) is not None:
            raise ToolkitError(
                f"{name} shares its memory with {other}, which is taken",
                where="checkpoint.without",
                fix=f"leave {other} out, too, or untie them",
            )


def _memory(value: Any) -> int:
    """Where a tensor's part on this rank lies; 0 where it has none."""
    if not isinstance(value, Tensor):
        return 0
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.data_ptr() if local.numel() else 0


def shapes_of(values: Mapping[str, Any]) -> dict[str, Shape]:
    """Global shapes by name."""
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in values.items()}


def names_of(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The names of all values in nested dicts, as a checkpoint has them."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from names_of(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def _is_below(name: str, keys: Collection[str]) -> bool:
    return any(prefix in keys for prefix in _prefixes(name))


def _prefixes(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`."""
    while name:
        yield name
        name = name.rpartition(".")[0]
