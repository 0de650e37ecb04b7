"""DCP's load planner, with keys that may be missing."""

from __future__ import annotations

import io
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
from toolkit.checkpoint.loading.differing import both_shapes, difference
from toolkit.checkpoint.tensors import refuse_nested
from toolkit.errors import ToolkitError


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, but chosen keys may be missing from the checkpoint. All else that differs is named at once.

    Args:
        optional: keys that may be missing; each stands for all keys below it too.
    """

    def __init__(self, optional: tuple[str, ...]) -> None:
        super().__init__(allow_partial_load=True)
        self._optional = optional
        self.missing: tuple[str, ...] = ()

    def create_local_plan(self) -> LoadPlan:
        """DCP's plan of the keys that exist."""
        assert self.metadata is not None
        refuse_nested(self.state_dict)
        self.missing = tuple(sorted(set(self.state_dict) - set(self.metadata.state_dict_metadata)))
        self._refuse_what_differs()
        # DCP's way takes a millisecond for a DTensor, and works out the place of some uneven parts wrongly (`boxes`).
        placed = {name: tensor for name, tensor in self.state_dict.items() if self._is_placed(name, tensor)}
        others = {name: value for name, value in self.state_dict.items() if name not in placed}
        plan = create_default_local_load_plan(others, self.metadata, strict=False)
        return LoadPlan([*plan.items, *(item for name, tensor in placed.items() for item in self._items(name, tensor))])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value where it was. DCP makes text of every key, and a dict may have numbers for keys."""
        put_value(
            self.original_state_dict, self.mappings[read_item.dest_index.fqn], torch.load(value, weights_only=True)
        )

    def _is_placed(self, name: str, value: object) -> bool:
        """Whether it is a DTensor of which this rank has a part."""
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

    def _refuse_what_differs(self) -> None:
        lacking = [name for name in self.missing if not is_optional(name, self._optional)]
        shapes = [said for name, value in self.state_dict.items() if (said := self._differing(name, value))]
        if lacking or shapes:
            raise ToolkitError(
                f"the checkpoint {difference(lacking, shapes=shapes)}",
                fix="load a checkpoint of this model"
                + (", or name what it may lack in `optional`" if lacking else "")
                + (", or give the model the saved shapes" if shapes else ""),
            )

    def _differing(self, name: str, value: object) -> str:
        """A tensor of another shape than the checkpoint's, or one that is a tensor on one side alone."""
        assert self.metadata is not None
        record = self.metadata.state_dict_metadata.get(name)
        if record is None:
            return ""
        there = tuple(record.size) if isinstance(record, TensorStorageMetadata) else None
        here = tuple(value.size()) if isinstance(value, torch.Tensor) else None
        return both_shapes(name, there, here) if there != here else ""


def put_value(tree: Any, path: Sequence[str | int], value: object) -> None:
    """Set what stands at DCP's path in nested dicts and lists."""
    *above, last = path
    for part in above:
        tree = tree[_own_key(tree, part)]
    tree[_own_key(tree, last)] = value


def _own_key(place: Any, part: str | int) -> Any:
    """The key or place that DCP's path means."""
    if isinstance(place, Mapping):
        return next((key for key in place if str(key) == part), part)
    return part


def is_optional(name: str, optional: tuple[str, ...]) -> bool:
    """Whether a key is one of these, or below one of them."""
    return any(name == key or name.startswith(f"{key}.") for key in optional)
