"""DCP's load planner, with keys that may be missing."""

from __future__ import annotations

from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan

from toolkit.errors import ToolkitError


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, except that chosen keys may be missing from the checkpoint and all others are named at once."""

    def __init__(self, optional: tuple[str, ...]) -> None:
        super().__init__(allow_partial_load=True)
        self._optional = optional
        self.missing: tuple[str, ...] = ()

    def create_local_plan(self) -> LoadPlan:
        """DCP's plan of the keys that exist."""
        assert self.metadata is not None
        self.missing = tuple(sorted(set(self.state_dict) - set(self.metadata.state_dict_metadata)))
        required = [name for name in self.missing if not self._is_optional(name)]
        if required:
            raise ToolkitError(
                f"the checkpoint does not hold {', '.join(required)}",
                fix="load a checkpoint of this model, or name these keys in `optional`",
            )
        return super().create_local_plan()

    def _is_optional(self, name: str) -> bool:
        return any(name == key or name.startswith(f"{key}.") for key in self._optional)
