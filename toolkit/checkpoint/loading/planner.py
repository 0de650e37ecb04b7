"""A DCP load planner that accepts checkpoints without certain optional keys."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.boxes import chunk_of
from toolkit.checkpoint.tensors import refuse_nested
from toolkit.errors import ToolkitError

__all__ = ["both_shapes", "difference"]


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, except that `optional` keys may be missing, and one error reports all other differences."""

    def __init__(self, optional: tuple[str, ...]) -> None:
        super().__init__(allow_partial_load=True)
        self._optional = optional
        self.missing: tuple[str, ...] = ()

    def create_local_plan(self) -> LoadPlan:
        """Return DCP's plan for the keys that the checkpoint has."""
        assert self.metadata is not None
        refuse_nested(self.state_dict)
        records = self.metadata.state_dict_metadata.items()
        saved = {name: tuple(at.size) if isinstance(at, TensorStorageMetadata) else None for name, at in records}
        self.missing = refuse_differences(self.state_dict, saved, self._optional)
        # For DTensors DCP takes a millisecond each, and computes wrong offsets for some uneven parts (see `boxes`).
        placed = {name: tensor for name, tensor in self.state_dict.items() if self._is_placed(name, tensor)}
        others = {name: value for name, value in self.state_dict.items() if name not in placed}
        plan = create_default_local_load_plan(others, self.metadata, strict=False)
        return LoadPlan([*plan.items, *(item for name, tensor in placed.items() for item in self._items(name, tensor))])

    def _is_placed(self, name: str, value: object) -> bool:
        """Return whether a value is a DTensor with a part on this rank."""
        assert self.metadata is not None
        record = self.metadata.state_dict_metadata.get(name)
        return (
            isinstance(value, DTensor)
            and isinstance(record, TensorStorageMetadata)
            and value.device_mesh.get_coordinate() is not None
        )

    def _items(self, name: str, tensor: DTensor) -> list[ReadItem]:
        assert self.metadata is not None
        record = self.metadata.state_dict_metadata[name]
        assert isinstance(record, TensorStorageMetadata)
        return create_read_items_for_chunk_list(name, record, [chunk_of(tensor, name)])


def refuse_differences(
    state: Mapping[str, Any], saved: Mapping[str, "Shape"], optional: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names that a checkpoint lacks. Raises ToolkitError if they are not `optional`, or shapes differ.

    `saved` contains the shape of each tensor in the checkpoint, and None for other values.
    """
    missing = tuple(sorted(state.keys() - saved.keys()))
    lacking = [name for name in missing if not is_optional(name, optional)]
    here = {name: value.shape if isinstance(value, torch.Tensor) else None for name, value in state.items()}
    shapes = [
        both_shapes(name, saved[name], here[name]) for name in here if name in saved and saved[name] != here[name]
    ]
    if lacking or shapes:
        plain = {other.replace(_COMPILED, ""): other for other in saved}
        alike = next(filter(None, (plain.get(name.replace(_COMPILED, "")) for name in lacking)), "")
        raise ToolkitError(
            f"the checkpoint {difference(lacking, shapes=shapes)}"
            + (f"; it contains {alike}: torch.compile adds {_COMPILED} to names" if alike else ""),
            fix=("pass the state_dict of the compiled model, or save that of the model itself" if alike else "")
            or "load a checkpoint of this model"
            + (", or list the missing keys in `optional`" if lacking else "")
            + (", or build the model with the saved shapes" if shapes else ""),
        )
    return missing


def put_value(tree: Any, path: Sequence[str | int], value: object) -> None:
    """Set the value at DCP's path in nested dicts and lists."""
    *above, last = path
    for part in above:
        tree = tree[_own_key(tree, part)]
    tree[_own_key(tree, last)] = value


def _own_key(container: Any, part: str | int) -> Any:
    """Return the actual key or index in a container for one part of a DCP path."""
    if isinstance(container, Mapping):
        return next((key for key in container if str(key) == part), part)
    return part


def is_optional(name: str, optional: tuple[str, ...]) -> bool:
    """Return whether a key is in `optional`, or below one of its keys."""
    return any(name == key or name.startswith(f"{key}.") for key in optional)


_COMPILED = "_orig_mod."  # what torch.compile adds to the names of parameters
MOST_NAMED = 10  # the limit of names per kind of difference: in a wider model, thousands of tensors differ

Shape = Sequence[int] | None  # None for a value other than a tensor


def difference(lacking: Sequence[str] = (), extra: Sequence[str] = (), shapes: Sequence[str] = ()) -> str:
    """Describe keys that a checkpoint lacks, has in excess, or has in other shapes (from `both_shapes`); "" if none."""
    differences = []
    if lacking:
        differences.append(f"lacks {_named(lacking)}")
    if extra:
        differences.append(f"contains {_named(extra)}, which this job does not have")
    if shapes:
        differences.append(f"has other shapes: {_named(shapes)}")
    return "; ".join(differences)


def both_shapes(name: str, there: Shape, here: Shape) -> str:
    """Return a tensor name with its shapes in the checkpoint and in memory: `head.bias (saved: [3], this job: [5])`."""
    return f"{name} (saved: {_shape(there)}, this job: {_shape(here)})"


def _shape(shape: Shape) -> str:
    return "no tensor" if shape is None else str(list(shape))


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
