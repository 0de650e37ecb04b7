"""What strategies must know of a model that they cannot read off it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from toolkit.config.table import nearest
from toolkit.errors import ToolkitError


@dataclass(frozen=True)
class Outline:
    """The order of a model's parts, by the names of its modules.

    Args:
        blocks: a ModuleList whose members run sequentially, the unit in which a model is sharded, recomputed and
            dealt to pipeline stages.
        before, after: modules that run before the first block and after the last. A pipeline stage that does without
            them has None in their place, and blocks of other stages are missing in the list: the model's `forward` asks.
        tensor: how tensor parallel ranks split a module, by names in which "*" matches one part of a name:
            {"blocks.*.attention_out": "row"}. The words are those of `toolkit.parallel.tensor_plan`.
    """

    blocks: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)

    def blocks_of(self, model: nn.Module) -> nn.ModuleList:
        """The blocks of this model, or of a pipeline stage of it.

        Raises:
            ToolkitError: the model has no such list, or not one of the other modules.
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
                f"{self.blocks!r} of {type(model).__name__} is a {type(blocks).__name__}",
                where="outline.blocks",
                fix="keep the blocks in an nn.ModuleList",
            )
        return blocks


def _fix(model: nn.Module, name: str, names: list[str]) -> str:
    if name in dict(model.named_parameters()):
        return f"{name} is a parameter: put it into a module of its own, and name that"
    near = nearest(name, names)
    shown = near or [one for one in names if "." not in one]
    return f"name one of its own: {', '.join(shown[:20])}"
