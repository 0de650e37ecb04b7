"""The declared structure of a model, which the parallel strategies cannot derive from the model itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from toolkit.config.table import nearest
from toolkit.errors import ToolkitError

__all__ = ["Outline"]


@dataclass(frozen=True)
class Outline:
    """The structure of a model: its blocks, and the modules before and after them, by module name.

    The model's `forward` must skip modules that are None and blocks that are missing from the list, because a pipeline
    stage lacks the modules and blocks of other stages.

    Args:
        blocks: a ModuleList whose members run sequentially; the unit of sharding, recomputation and pipeline stages.
        before, after: modules that run before the first block and after the last.
        tensor: how tensor-parallel ranks split modules, by names in which "*" matches one component:
            {"blocks.*.attention_out": "row"}. `toolkit.parallel.tensor_plan` lists the styles.
    """

    blocks: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)

    def blocks_of(self, model: nn.Module) -> nn.ModuleList:
        """Return the blocks of this model, or of a pipeline stage of it.

        Raises:
            ToolkitError: the model lacks this list, or one of the other modules.
        """
        names = dict(model.named_modules(remove_duplicate=False))
        for name in (self.blocks, *self.before, *self.after):
            owner, _, own_name = name.rpartition(".")
            of_other_stage = owner in names and getattr(names[owner], own_name, names) is None
            if name not in names and not of_other_stage:
                raise ToolkitError(
                    f"{type(model).__name__} has no module {name!r}",
                    where="outline",
                    fix=_fix(model, name, [one for one in names if one]),
                )
        blocks = names[self.blocks]
        if not isinstance(blocks, nn.ModuleList):
            raise ToolkitError(
                f"expected an nn.ModuleList in {self.blocks!r} of {type(model).__name__}, got {type(blocks).__name__}",
                where="outline.blocks",
                fix="keep the blocks in an nn.ModuleList",
            )
        return blocks


def _fix(model: nn.Module, name: str, names: list[str]) -> str:
    if name in dict(model.named_parameters()):
        return f"move the parameter {name} into a module of its own, and list this module instead"
    near = nearest(name, names)
    shown = near or [one for one in names if "." not in one]
    return f"use one of its modules: {', '.join(shown[:20])}"
