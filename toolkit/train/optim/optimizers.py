"""Create the optimizer that [train] selects, with parameter groups for weight decay."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from toolkit.config.train import TrainTable
from toolkit.errors import ToolkitError
from toolkit.train.blocks import blocks_of, is_below

__all__ = ["JointOptimizer"]


class JointOptimizer(torch.optim.Optimizer):
    """Combines several optimizers (`members`), which have no parameter in common, into one.

    `param_groups` contains the members' own dicts, and all members share this `state`. Setting a learning rate and
    loading or clearing state here therefore applies to the members.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for member in members for group in member.param_groups]
        named = [parameter for group in groups for parameter in group["params"]]
        if len(set(named)) != len(named):
            raise ToolkitError(
                "two of the optimizers have the same parameter",
                where="optimizer",
                fix="pass each parameter to only one optimizer",
            )
        self.members = tuple(members)
        super().__init__([{"params": named}], {})
        self.param_groups = groups
        for member in members:
            self.state.update(member.state)
            member.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "param_groups") and self.param_groups:
            raise ToolkitError(
                "a joint optimizer does not accept further parameters",
                where="optimizer",
                fix="add the parameters to a member before joining the members",
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Pass the new dicts to the members; torch's `load_state_dict` calls this at its end."""
        super().__setstate__(state)
        first = 0
        for member in self.members:
            after = first + len(member.param_groups)
            member.__setstate__({"state": self.state, "param_groups": self.param_groups[first:after]})
            first = after


def optimizer_of(model: nn.Module, train: TrainTable, hidden: Sequence[str] | None = None) -> torch.optim.Optimizer:
    """Return AdamW, SGD, or Muon for hidden matrices with AdamW for the rest. Tied weights are included once.

    `adamw_8bit` is that of bitsandbytes (Dettmers et al., arXiv 2110.02861): it quantises moments by blocks of 256 values,
    and keeps those of parameters with fewer than 4,096 values in fp32.

    Weight decay applies to matrices, not to vectors (biases, norms). Frozen parameters are omitted.

    Args:
        hidden: names of parameters, or of modules with hidden matrices, for Muon. By default the blocks of the model
            (`blocks_of`).

    Raises:
        ToolkitError: no parameter is trainable; Muon finds no hidden matrix; a name in `hidden` matches nothing;
            bitsandbytes is missing.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        raise ToolkitError(
            "the model has no trainable parameter", where="model", fix="keep requires_grad = True for some parameters"
        )
    for_muon = hidden_matrices(model, hidden) if train.optimizer == "muon" else []
    taken = {id(parameter) for parameter in for_muon}
    groups = _groups([one for one in named.values() if id(one) not in taken], train.weight_decay)
    if train.optimizer == "sgd":
        momentum = train.momentum
        return torch.optim.SGD(groups, lr=train.lr, momentum=momentum, nesterov=momentum > 0)
    betas = (train.betas[0], train.betas[1])
    if train.optimizer == "adamw_8bit":
        return _adamw_8bit()(groups, lr=train.lr, betas=betas, eps=train.eps)
    adamw = torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps) if groups else None
    if train.optimizer == "adamw":
        assert adamw is not None
        return adamw
    muon = torch.optim.Muon(
        for_muon,
        lr=train.lr,
        weight_decay=train.weight_decay,
        momentum=train.momentum,
        nesterov=train.momentum > 0,
        adjust_lr_fn="match_rms_adamw",
    )
    return JointOptimizer([muon, adamw] if adamw is not None else [muon])


def _adamw_8bit() -> Callable[..., torch.optim.Optimizer]:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        fix = "pip install 'toolkit[quantized]', or set optimizer = \"adamw\""
        raise ToolkitError("adamw_8bit requires the package bitsandbytes", where="train.optimizer", fix=fix) from None

    class Resumable(AdamW8bit):
        """With its state in tensors that a checkpoint can fill: bitsandbytes counts steps in an int."""

        state_dict = torch.optim.Optimizer.state_dict

        def init_state(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
            super().init_state(group, p, gindex, pindex)
            self.state[p]["step"] = torch.zeros((), dtype=torch.int64)

        def update_step(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
            state, steps = self.state[p], self.state[p]["step"]
            state["step"] = int(steps)
            super().update_step(group, p, gindex, pindex)
            state["step"] = steps.fill_(state["step"])

    return Resumable


def hidden_matrices(model: nn.Module, hidden: Sequence[str] | None = None) -> list[nn.Parameter]:
    """Return the weights for Muon: two-dimensional weights of hidden layers, but not of embeddings and heads.

    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024, which leaves embeddings, heads and
    vectors to AdamW. Updates are scaled like AdamW's (Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982,
    section 2.2), so that one learning rate and one decay serve both.

    Raises:
        ToolkitError: there are no such weights, or a name in `hidden` matches nothing.
    """
    names = list(blocks_of(model)) if hidden is None else list(hidden)
    inside, outside = _parted(model, names)
    if hidden is not None:
        every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        if unknown := [name for name in names if not any(is_below(one, [name]) for one in every)]:
            raise ToolkitError(
                f"the model has no parameter {', '.join(unknown)}",
                where="hidden",
                fix="use names of parameters or modules as in the model: blocks, or blocks.0.up.weight",
            )
    apart = outside | _embeddings(model)
    found = [one for one in inside if one.dim() == 2 and one.requires_grad and id(one) not in apart]
    if not found:
        raise ToolkitError(
            f"muon finds no hidden matrix in {type(model).__name__}: none of its two-dimensional weights is in "
            + ("a list of blocks" if hidden is None else ", ".join(names)),
            where="train.optimizer",
            fix='pass the modules with hidden matrices, as in optimizer_of(model, train, hidden=["layers"]), '
            'or set train.optimizer = "adamw"',
        )
    return found


def _parted(model: nn.Module, names: Sequence[str]) -> tuple[list[nn.Parameter], set[int]]:
    """Return the parameters below these names, without duplicates, and the ids of the others; tied ones can be both."""
    inside: dict[int, nn.Parameter] = {}
    outside: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_below(name, names):
            inside[id(parameter)] = parameter
        else:
            outside.add(id(parameter))
    return list(inside.values()), outside


def _embeddings(model: nn.Module) -> set[int]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds)}


def _groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the non-empty groups with and without weight decay."""
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
