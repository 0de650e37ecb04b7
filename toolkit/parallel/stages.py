"""Cut a model into pipeline stages, and present those of a rank as one module with the whole model's names.

A stage is the model without the parts of other stages: `Outline.before` is None except on the first, `Outline.after`
except on the last, and the list of blocks lacks those of others, so that a block keeps its name ("blocks.3").
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

    `name` is its first name in the whole model, `own_names` its names in each of the `stages`.
    """

    name: str
    stages: tuple[int, int]
    own_names: tuple[str, str]


def cut_stage(build: Callable[[], nn.Module], outline: Outline, cut: Sequence[range], stage: int) -> nn.Module:
    """Return the model with the parts of this stage only; `cut` has the blocks of all stages."""
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
    """Return a stage's inputs for `inputs` of the model; all on the meta device."""
    if stage == 0:
        return inputs
    first, count = cut[stage].start, cut[-1].stop
    before = cut_stage(build, outline, (range(first), range(first, count)), 0)  # all earlier stages, as one
    with torch.no_grad(), buffers_on_meta(before):
        stream: Tensor = before(inputs)
    return stream.requires_grad_()


def shared_weights(model: nn.Module, outline: Outline, cut: Sequence[range]) -> list[SharedWeight]:
    """Return the parameters that several stages need, from the whole model.

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
                f"{of_one[0]} is one parameter of {len(held)} pipeline stages ({', '.join(of_one)})",
                where="parallel.pp",
                fix="untie it, or cut the model into two stages at most",
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
            f"no pipeline stage would contain {name} of {type(model).__name__}: its outline names no module with it",
            where="outline",
            fix=f"name the module of {name} in `before` or `after`, or make it part of the blocks",
        )
    return found


class StagesOfRank(nn.Module):
    """The stages of one rank as one module, under the whole model's names.

    For optimizers and checkpoints; it cannot be called.
    """

    def __init__(self, stages: Sequence[nn.Module], outline: Outline, known_as: Mapping[str, str]) -> None:
        """Args:
            stages: from `cut_stage`, with their final parameters.
        known_as: names in the whole model of parameters with another name here; they come first, so that checkpoints
        and
            optimizers use one name everywhere.
        """
        super().__init__()
        for own_name, name in known_as.items():
            (parameter,) = (found for stage in stages for found in _parameters_named(stage, own_name))
            _place(self, name, parameter)
        for stage in stages:
            _merge(self, stage, outline.blocks.split("."))
        seen = {id(module) for module in self.modules()}
        # A tuple instead of a module list, because their parts have the whole model's names.
        self._unseen = tuple(module for stage in stages for module in stage.modules() if id(module) not in seen)

    def forward(self, *_: object) -> None:
        raise ToolkitError(
            "the stages of one rank are not callable as a model",
            where="parallel.pp",
            fix="pp = 1, or pass micro-batches by `DistributedModel.run`",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Switch the stages to training or evaluation as well, because their `forward` depends on it."""
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
    """Add the parts of `stage`; modules above the blocks occur in several stages, so their parts are added instead."""
    for name, buffer in stage.named_buffers(recurse=False):
        into.register_buffer(name, buffer, persistent=name not in stage._non_persistent_buffers_set)
    for name, child in stage.named_children():
        if to_blocks and name == to_blocks[0]:
            if name not in into._modules:
                into.add_module(name, nn.ModuleList() if len(to_blocks) == 1 else nn.Module())
            _merge(into.get_submodule(name), child, to_blocks[1:])
        elif name not in into._modules or not to_blocks:
            into.add_module(name, child)
