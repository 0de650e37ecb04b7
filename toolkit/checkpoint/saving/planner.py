"""DCP's save planner, with the right place for every part of a tensor."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.boxes import chunk_of


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, which works out some uneven parts wrongly: `boxes`."""

    def create_local_plan(self) -> SavePlan:
        """DCP's plan of what this rank writes."""
        plan = super().create_local_plan()
        items = [self._placed(item) for item in plan.items]
        self.plan = replace(plan, items=[item for item in items if not _is_empty_part(item)])
        return self.plan

    def _placed(self, item: WriteItem) -> WriteItem:
        tensor = self.state_dict[item.index.fqn]
        if not isinstance(tensor, DTensor) or item.tensor_data is None:
            return item
        chunk = chunk_of(tensor, item.index.fqn)
        index = MetadataIndex(item.index.fqn, chunk.offsets)
        return replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=chunk))


def _is_empty_part(item: WriteItem) -> bool:
    """Whether a rank has nothing of a tensor that has elements.

    It would begin where another rank's part begins, and of two parts at one place DCP stores one.
    """
    data = item.tensor_data
    return data is not None and 0 in data.chunk.sizes and 0 not in data.size
