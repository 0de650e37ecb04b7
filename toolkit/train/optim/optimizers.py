"""The optimizer that [train] names, with each of a model's parameters in the group where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from toolkit.errors import ToolkitError
from toolkit.train.blocks import blocks_of
from toolkit.train.optim.joint_optimizer import JointOptimizer


class OptimizerSettings(Protocol):
    """What an optimizer needs of the job's table `[train]`."""

    optimizer: Literal["adamw", "muon", "sgd"]
    lr: float
    betas: list[float]
    momentum: float
    weight_decay: float


def optimizer_of(
    model: nn.Module, settings: OptimizerSettings, hidden: Sequence[str] | None = None
) -> torch.optim.Optimizer:
    """AdamW, SGD, or Muon for the hidden matrices and AdamW for the rest. A tied weight is in it once.

    Matrices decay, vectors (biases, norms) do not. Frozen parameters are omitted.

    Args:
        hidden: for muon: names of parameters, or of modules whose matrices are meant. By default, those of the
            model's blocks (`blocks_of`).

    Raises:
        ToolkitError: nothing learns; muon finds no hidden matrix; `hidden` names nothing.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        raise ToolkitError(
            "the model has no parameter that learns", where="model", fix="leave requires_grad on for some of them"
        )
    for_muon = hidden_matrices(model, hidden) if settings.optimizer == "muon" else []
    taken = {id(parameter) for parameter in for_muon}
    groups = _groups([one for one in named.values() if id(one) not in taken], settings.weight_decay)
    if settings.optimizer == "sgd":
        momentum = settings.momentum
        return torch.optim.SGD(groups, lr=settings.lr, momentum=momentum, nesterov=momentum > 0)
    adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.betas[0], settings.betas[1])) if groups else None
    if settings.optimizer == "adamw":
        assert adamw is not None
        return adamw
    muon = torch.optim.Muon(
        for_muon,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.momentum > 0,
        adjust_lr_fn="match_rms_adamw",
    )
    return JointOptimizer([muon, adamw] if adamw is not None else [muon])


def hidden_matrices(model: nn.Module, hidden: Sequence[str] | None = None) -> list[nn.Parameter]:
    """The weights that Muon is for: two-dimensional, of hidden layers, and neither of an embedding nor of a head.

    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024, which leaves embeddings, heads and
    vectors to AdamW. An update is scaled as AdamW's are (Liu et al., Muon is Scalable for LLM Training, arXiv
    2502.16982, section 2.2), so that one learning rate and one decay serve both.

    Raises:
        ToolkitError: there is none; `hidden` names nothing.
    """
    names = list(blocks_of(model)) if hidden is None else list(hidden)
    inside, outside = _parted(model, names)
    if hidden is not None:
        every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        if unknown := [name for name in names if not any(_is_below(one, [name]) for one in every)]:
            raise ToolkitError(
                f"the model has no parameter {', '.join(unknown)}",
                where="hidden",
                fix="name parameters or modules as the model does: blocks, or blocks.0.up.weight",
            )
    apart = outside | _embeddings(model)
    found = [one for one in inside if one.dim() == 2 and one.requires_grad and id(one) not in apart]
    if not found:
        raise ToolkitError(
            f"muon finds no hidden matrix in {type(model).__name__}: none of its two-dimensional weights is in "
            + ("a list of blocks" if hidden is None else ", ".join(names)),
            where="train.optimizer",
            fix='name the modules with hidden matrices, as in optimizer_of(model, settings, hidden=["layers"]), '
            'or set train.optimizer = "adamw"',
        )
    return found


def _parted(model: nn.Module, names: Sequence[str]) -> tuple[list[nn.Parameter], set[int]]:
    """Parameters below these names, each once, and the identities of all others; a tied one may be both."""
    inside: dict[int, nn.Parameter] = {}
    outside: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if _is_below(name, names):
            inside[id(parameter)] = parameter
        else:
            outside.add(id(parameter))
    return list(inside.values()), outside


def _embeddings(model: nn.Module) -> set[int]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds)}


def _groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Those that decay and those that do not; no group is empty."""
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _is_below(name: str, names: Sequence[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in names)
