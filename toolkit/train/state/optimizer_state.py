"""What of an optimizer a checkpoint holds: tensors by the names of parameters, and what a run changed in its groups."""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from toolkit.errors import ToolkitError

Entries = dict[str, Any]  # what an optimizer keeps of one parameter: "exp_avg", "step", ...


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Entries]:
    """The optimizer's own dicts, by the canonical name of the parameter; none before the first step.

    Filling these tensors fills the optimizer.
    """
    # torch would take a step of its own to make a state, which an optimizer that has not begun must not have.
    if not optimizer.state:
        return {}
    try:
        state: dict[str, Entries] = get_optimizer_state_dict(model, optimizer)["state"]  # type: ignore[assignment]
    except KeyError:
        raise ToolkitError(
            "the optimizer has parameters that the model has not",
            where="optimizer",
            fix="make them parameters of the model, so that they have names in a checkpoint",
        ) from None
    return state


def refuse_flat_parameters(model: nn.Module) -> None:
    """The older FSDP keeps flat parameters, whose state torch hands out as copies."""
    if FullyShardedDataParallel.fsdp_modules(model):
        raise ToolkitError(
            "FullyShardedDataParallel keeps flat parameters, which are not saved",
            where="model",
            fix="shard the model with torch.distributed.fsdp.fully_shard",
        )


@torch.no_grad()
def make_room(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that a first step makes, for a load to fill. Gradients and rates stay.

    What the parameters hold may change, as some optimizers step at a rate of 0: load them afterwards, too.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    optimizer.state.clear()
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def forget(optimizer: torch.optim.Optimizer, unfilled: Collection[Entries]) -> None:
    """Drop these entries: their parameters had no state when the checkpoint was saved."""
    entries = {id(entry) for entry in unfilled}
    for parameter in [parameter for parameter, kept in optimizer.state.items() if id(kept) in entries]:
        del optimizer.state[parameter]


class GroupSettings:
    """An optimizer's settings: as the job gave them, and what changed since.

    Settings come from the job, so that a resumed run may have others. What the run itself changed (a scheduler's
    rate, its `initial_lr`, a cycled momentum) continues from its value.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._given = self._now()

    def changed(self) -> list[dict[str, Any]]:
        """What differs from the job's settings, one dict a group."""
        nothing: dict[str, Any] = {}
        return [
            {name: value for name, value in now.items() if name not in given or given[name] != value}
            for now, given in zip_longest(self._now(), self._given, fillvalue=nothing)
        ]

    def take_over(self, changed: list[dict[str, Any]]) -> str:
        """Go on from `changed()` of an earlier life; returns what could not be taken over."""
        groups = self._optimizer.param_groups
        if len(changed) != len(groups):
            return f"the optimizer has {len(groups)} groups and not {len(changed)}: their rates begin anew"
        for group, values in zip(groups, changed, strict=True):
            for name, value in values.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
        return ""

    def _now(self) -> list[dict[str, Any]]:
        return [
            {
                name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self._optimizer.param_groups
        ]
