"""Cut a model into pipeline stages, and present those of a rank as one module with the names of the whole model.

A stage is the model without the parts of other stages. The modules in `Outline.before` are None except on the first
stage, those in `Outline.after` except on the last, and blocks of other stages are deleted from the list without
renumbering it ("blocks.3").
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import ToolkitError
from toolkit.parallel.materialise import buffers_on_meta
from toolkit.parallel.outline import Outline


@dataclass(frozen=True)
class SharedWeight:
    """A parameter of the whole model that two stages have, such as tied weights of the first and last layer.

    `name` is its first name in the whole model, `own_names` are its names in the two `stages`.
    """

    name: str
    stages: tuple[int, int]
    own_names: tuple[str, str]


def cut_stage(build: Callable[[], nn.Module], outline: Outline, cut: Sequence[range], stage: int) -> nn.Module:
    """Return the model with only the parts of this stage; `cut` lists the blocks of all stages."""
    model = build()
    kept = [*(outline.before if stage == 0 else ()), *(outline.after if stage == len(cut) - 1 else ())]
    for name in {*outline.before, *outline.after} - {*kept}:
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, None)
    blocks = outline.blocks_of(model)
    for number in range(len(blocks)):
        if number not in cut[stage]:
            del blocks._modules[str(number)]  # `del blocks[number]` would renumber the others
    return model


def stream_into(
    build: Callable[[], nn.Module], outline: Outline, cut: Sequence[range], stage: int, inputs: Tensor
) -> Tensor:
    """Return the inputs that a stage receives for the model inputs `inputs`; all on the meta device."""
    if stage == 0:
        return inputs
    first, count = cut[stage].start, cut[-1].stop
    before = cut_stage(build, outline, (range(first), range(first, count)), 0)  # all earlier stages as a single one
    with torch.no_grad(), buffers_on_meta(before):
        stream: Tensor = before(inputs)
    return stream.requires_grad_()


def shared_weights(model: nn.Module, outline: Outline, cut: Sequence[range]) -> list[SharedWeight]:
    """Return the parameters of the whole model that two stages need.

    Raises:
        ToolkitError: a parameter is in no part that `outline` names, or in more than two stages.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = []
    for of_one in names.values():
        held: dict[int, str] = {}
        for name in of_one:
            for stage in _stages_of(name, model, outline, cut):
                held.setdefault(stage, name)
        if len(held) > 2:
            raise ToolkitError(
                f"expected {of_one[0]} in at most 2 pipeline stages, got {len(held)} ({', '.join(of_one)})",
                where="parallel.pp",
                fix="untie this parameter, or cut the model into at most 2 stages",
            )
        if len(held) == 2:
            (one, its_name), (other, others_name) = sorted(held.items())
            shared.append(SharedWeight(of_one[0], (one, other), (its_name, others_name)))
    return shared


def _stages_of(name: str, model: nn.Module, outline: Outline, cut: Sequence[range]) -> list[int]:
    if name.startswith(f"{outline.blocks}."):
        number = int(name.removeprefix(f"{outline.blocks}.").partition(".")[0])
        return [stage for stage, blocks in enumerate(cut) if number in blocks]
    ends = [(0, outline.before), (len(cut) - 1, outline.after)]
    found = [stage for stage, parts in ends if any(name.startswith(f"{part}.") for part in parts)]
    if not found:
        raise ToolkitError(
            f"no pipeline stage would contain {name}, because no module in the Outline of {type(model).__name__} does",
            where="outline",
            fix=f"list the module of {name} in Outline.before or Outline.after, or move {name} into a block",
        )
    return found


class StagesOfRank(nn.Module):
    """The stages of one rank as one module, with the names of the whole model.

    Optimizers and checkpoints use this module; it cannot be called.
    """

    def __init__(self, stages: Sequence[nn.Module], outline: Outline, known_as: Mapping[str, str]) -> None:
        """Merge the stages.

        Args:
            stages: from `cut_stage`, with their final parameters.
            known_as: maps parameter names in a stage to those in the whole model, if they differ. These parameters are
                registered first, so that checkpoints and optimizers use the same name on all ranks.
        """
        super().__init__()
        for own_name, name in known_as.items():
            (parameter,) = (found for stage in stages for found in _parameters_named(stage, own_name))
            _place(self, name, parameter)
        for stage in stages:
            _merge(self, stage, outline.blocks.split("."))
        seen = {id(module) for module in self.modules()}
        # A tuple instead of a ModuleList, because their parameters are already registered under other names.
        self._unseen = tuple(module for stage in stages for module in stage.modules() if id(module) not in seen)

    def forward(self, *_: object) -> None:
        raise ToolkitError(
            "the pipeline stages of one rank cannot be called as a model",
            where="parallel.pp",
            fix="set pp = 1, or run micro-batches with `DistributedModel.run`",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Switch the stages between training and evaluation as well, because their `forward` depends on it."""
        super().__setattr__(name, value)
        if name == "training":
            for module in self.__dict__.get("_unseen", ()):
                module.training = value


def _parameters_named(stage: nn.Module, name: str) -> Iterator[nn.Parameter]:
    for own_name, parameter in stage.named_parameters(remove_duplicate=False):
        if own_name == name:
            yield parameter


def _place(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register this parameter in `module` under a dotted name."""
    *owners, own_name = name.split(".")
    for owner in owners:
        if module._modules.get(owner) is None:
            module.add_module(owner, nn.Module())
        module = module.get_submodule(owner)
    module.register_parameter(own_name, parameter)


def _merge(into: nn.Module, stage: nn.Module, to_blocks: Sequence[str]) -> None:
    """Add the modules of `stage` to `into`; recurse into the parents of the blocks, which several stages have."""
    for name, buffer in stage.named_buffers(recurse=False):
        into.register_buffer(name, buffer, persistent=name not in stage._non_persistent_buffers_set)
    for name, child in stage.named_children():
        if to_blocks and name == to_blocks[0]:
            if name not in into._modules:
                into.add_module(name, nn.ModuleList() if len(to_blocks) == 1 else nn.Module())
            _merge(into.get_submodule(name), child, to_blocks[1:])
        elif name not in into._modules or not to_blocks:
            into.add_module(name, child)
