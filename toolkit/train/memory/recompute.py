"""Activation checkpointing: blocks keep only their input and recompute the rest in the backward pass.

Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174. Gradients are bitwise the same, even with
dropout, because torch restores the random streams. Call `recompute` first, then compile, then shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from toolkit.config.train import TrainTable
from toolkit.errors import ToolkitError
from toolkit.train.blocks import needed_blocks
from toolkit.train.memory.activations import cheapest, measure_activations

# Returns a scalar loss from the model's outputs and the targets.
LossOf = Callable[[Any, Any], Tensor]


MEASURED = ("large", "budget")  # kinds of recomputation that depend on the activations of a micro-batch


def recompute(
    model: nn.Module,
    train: TrainTable,
    *,
    loss_of: LossOf | None = None,
    micro_batch: tuple[Tensor, Tensor] | None = None,
    below: Sequence[str] = (),
) -> list[str]:
    """Enable recomputation for the blocks that [train] selects; return their names.

    Args:
        loss_of, micro_batch: for "large" and "budget", which measure a forward pass: inputs and targets of the real
            size. Nothing is computed: activations count in the dtype of the parameters, and attention with its scores,
            although autocast and GPU kernels reduce both.
        below: parents of the blocks, if `blocks_of` does not find them.

    Raises:
        ToolkitError: the model has no blocks; a measurement lacks its inputs or reads tensor values on the meta device;
            no choice fits the budget.
    """
    kind = train.recompute
    if kind == "none":
        return []
    blocks = needed_blocks(model, "activation checkpointing", below)
    if kind in ("every", "selective"):
        every = train.recompute_every if kind == "every" else 1
        names = [name for number, name in enumerate(blocks, start=1) if number % every == 0]
    else:
        if loss_of is None or micro_batch is None:
            raise ToolkitError(
                f"recompute = {kind!r} measures activations, which requires loss_of and micro_batch",
                where="train.recompute",
                fix="pass loss_of and micro_batch to recompute(...), or choose another kind",
            )
        inputs, targets = (one.to("meta") for one in micro_batch)
        measured = measure_activations(model, lambda twin: loss_of(twin(inputs), targets), blocks)
        names = [block.name for block in measured.blocks if block.kept_bytes > train.recompute_above_mb * 1e6]
        if kind == "budget":
            names = cheapest(measured, train.activation_budget_gb * 1e9)
    for name in names:
        recompute_block(blocks[name], selective=kind == "selective")
    return names


def recompute_block(block: nn.Module, *, selective: bool = False) -> None:
    """Enable recomputation for one module, in place; its class and parameter names do not change.

    `selective` keeps the results of matrix products, convolutions and attention, and recomputes cheap operations:
    norms, activations, dropout (Korthikanti et al., Reducing Activation Recomputation, arXiv 2205.05198, section 5).
    """
    if is_recomputed(block):
        return
    context = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
    # `copy.deepcopy` copies a partial of a bound method with its module, but not a function in a closure.
    block.forward = _Recomputed(checkpoint, block.forward, use_reentrant=False, **context)


def is_recomputed(block: nn.Module) -> bool:
    return isinstance(block.__dict__.get("forward"), _Recomputed)


def forget_recompute(model: nn.Module) -> None:
    """Undo `recompute` on all modules of a model."""
    for module in model.modules():
        if is_recomputed(module):
            del module.forward


class _Recomputed(partial[Any]):
    """The forward method of a module, wrapped in torch's checkpoint."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recomputed:
        return _Recomputed(self.func, *copy.deepcopy(self.args, memo), **self.keywords)


def _policy(context: Any, operation: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    """Save expensive results, except the results of attention with dropout.

    Operations that draw random numbers must all be recomputed, otherwise later draws would differ.
    """
    if operation in _dear() and not _draws(operation, args, named):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: Sequence[Any], named: dict[str, Any]) -> bool:
    places = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in places:
        return False
    place = places.index("dropout_p")
    return bool(args[place] if place < len(args) else named.get("dropout_p", 0.0))


def _dear() -> Collection[Any]:
    aten = torch.ops.aten
    names = (
        "mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "_scaled_mm",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    )  # fmt: skip
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]
