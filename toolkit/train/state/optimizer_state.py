"""An optimizer's part of a checkpoint: tensors by parameter name, and settings that the run changed."""

from collections.abc import Collection
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from toolkit.errors import ToolkitError

Entries = dict[str, Any]  # an optimizer's state of one parameter: "exp_avg", "step", ...


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Entries]:
    """Return the optimizer's own dicts by canonical parameter name; empty before the first step.

    Filling these tensors fills the optimizer.
    """
    # torch would step to create a state, which an optimizer before its first step must not have.
    if not optimizer.state:
        return {}
    try:
        state: dict[str, Entries] = get_optimizer_state_dict(model, optimizer)["state"]  # type: ignore[assignment]
    except KeyError:
        raise ToolkitError(
            "the optimizer has parameters that the model does not have",
            where="optimizer",
            fix="register them in the model, so that they have names in a checkpoint",
        ) from None
    return state


def refuse_flat_parameters(model: nn.Module) -> None:
    """Reject the older FSDP, whose flat parameters have copied optimizer state."""
    if FullyShardedDataParallel.fsdp_modules(model):
        raise ToolkitError(
            "FullyShardedDataParallel keeps flat parameters, which are not saved",
            where="model",
            fix="shard the model with torch.distributed.fsdp.fully_shard",
        )


@torch.no_grad()
def make_room(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that a first step creates, for a load to fill. Gradients and rates stay.

    Parameter values may change, because some optimizers step at a rate of 0: load them afterwards.
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
    """An optimizer's settings: as the job set them, and as the run changed them.

    Settings come from the job, so a resumed run may have others. What the run changed (a scheduler's rate, its
    `initial_lr`, a cycled momentum) continues from its value.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._given = self._now()

    def changed(self) -> list[dict[str, Any]]:
        """Return what differs from the job's settings, one dict per group."""
        nothing: dict[str, Any] = {}
        return [
            {name: value for name, value in now.items() if name not in given or given[name] != value}
            for now, given in zip_longest(self._now(), self._given, fillvalue=nothing)
        ]

    def take_over(self, changed: list[dict[str, Any]]) -> str:
        """Restore `changed()` of an earlier attempt; return what could not be restored."""
        groups = self._optimizer.param_groups
        if len(changed) != len(groups):
            return (
                f"the optimizer has {len(groups)} groups and not {len(changed)}: their rates start from the beginning"
            )
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
