"""The optimizer state in a checkpoint: tensors by parameter name, and settings that the run changed."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from toolkit.errors import ToolkitError
from toolkit.train.memory.streamed_optimizer import StreamedOptimizer

Entries = dict[str, Any]  # the optimizer state of one parameter: "exp_avg", "step", ...


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Entries]:
    """Return the optimizer's own state dicts by canonical parameter name; empty before the first step.

    Loading into these tensors loads the optimizer.
    """
    # torch would perform a step to create the state, but before the first step there must be none.
    if not optimizer.state:
        return {}
    try:
        state: dict[str, Entries] = get_optimizer_state_dict(model, optimizer)["state"]  # type: ignore[assignment]
    except KeyError:
        raise ToolkitError(
            "the optimizer has parameters that the model does not have",
            where="optimizer",
            fix="register them in the model, which gives them names in a checkpoint",
        ) from None
    return state


def refuse_flat_parameters(model: nn.Module) -> None:
    """Reject FSDP1: for its flat parameters, torch returns copies of the optimizer state, which a load cannot fill."""
    if FullyShardedDataParallel.fsdp_modules(model):
        raise ToolkitError(
            "FullyShardedDataParallel has flat parameters, which toolkit cannot save",
            where="model",
            fix="shard the model with torch.distributed.fsdp.fully_shard",
        )


@torch.no_grad()
def make_room(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state of every parameter, as a first step does, so that a load can fill it.

    Gradients and learning rates are kept. Load the parameters afterwards, because some optimizers change them even at a
    learning rate of 0.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    optimizer.state.clear()
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        if isinstance(optimizer, StreamedOptimizer):  # zeros for all parameters may need more memory than there is
            for chunk in optimizer.chunks:
                _step_with_zeros(chunk, partial(optimizer.step_chunk, chunk))
        else:
            _step_with_zeros([one for group in optimizer.param_groups for one in group["params"]], optimizer.step)
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def _step_with_zeros(parameters: Sequence[nn.Parameter], step: Callable[[], object]) -> None:
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def forget(optimizer: torch.optim.Optimizer, unfilled: Collection[Entries]) -> None:
    """Drop these entries: their parameters had no state when the checkpoint was saved."""
    entries = {id(entry) for entry in unfilled}
    for parameter in [parameter for parameter, kept in optimizer.state.items() if id(kept) in entries]:
        del optimizer.state[parameter]


class GroupSettings:
    """The settings of the optimizer's parameter groups: as configured by the job, and as changed by the run.

    Settings come from the job, so a resumed run may have others. Settings that the run changed (a learning rate and
    `initial_lr` of a scheduler, a cycled momentum) are saved and restored.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._given = self._now()

    def changed(self) -> list[dict[str, Any]]:
        """Return the settings that differ from the job's, one dict per group."""
        nothing: dict[str, Any] = {}
        return [
            {name: value for name, value in now.items() if name not in given or given[name] != value}
            for now, given in zip_longest(self._now(), self._given, fillvalue=nothing)
        ]

    def take_over(self, changed: list[dict[str, Any]]) -> str:
        """Restore `changed()` of an earlier attempt; return a message if that is not possible, else ""."""
        groups = self._optimizer.param_groups
        if len(changed) != len(groups):
            return (
                f"the optimizer has {len(groups)} parameter groups, but the checkpoint has {len(changed)}: their "
                "learning rates start from the beginning"
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
