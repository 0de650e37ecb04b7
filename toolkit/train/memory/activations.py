"""Choose the blocks to recompute, by the activations that each keeps for its backward pass."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from toolkit.errors import ToolkitError
from toolkit.train.memory.local_parts import bytes_on
from toolkit.train.memory.on_meta import on_meta, on_shapes_alone
from toolkit.train.memory.tensor_meter import TensorMeter

__all__ = ["Activations", "BlockActivations", "cheapest", "measure_activations"]


@dataclass(frozen=True)
class BlockActivations:
    """Activations of one block for one micro-batch.

    The block keeps `kept_bytes` for its backward pass, or only its output of `output_bytes` if it is recomputed. `flops`
    are those of the forward pass, which recomputation repeats.
    """

    name: str
    kept_bytes: int
    output_bytes: int
    flops: int


@dataclass(frozen=True)
class Activations:
    """Activations of a model: its blocks in order, and `other_bytes` outside of them, such as logits."""

    blocks: Sequence[BlockActivations]
    other_bytes: int

    def peak_bytes(self, recomputed: Collection[str]) -> int:
        """Return the peak activation memory in bytes if these blocks are recomputed.

        The peak occurs at the end of the forward pass, or during the backward pass of a recomputed block, together with
        the activations of the blocks before it. Bytes outside of blocks always count.
        """
        kept, peak = self.other_bytes, self.other_bytes
        for block in self.blocks:
            if block.name in recomputed:
                peak = max(peak, kept + block.output_bytes + block.kept_bytes)
                kept += block.output_bytes
            else:
                kept += block.kept_bytes
        return max(peak, kept)


def cheapest(measured: Activations, budget_bytes: float) -> list[str]:
    """Return the blocks to recompute so that the peak fits the budget; a greedy choice keeps their FLOPs low.

    It selects the blocks that free the most bytes per FLOP. Among equal blocks, it prefers early ones, because the
    backward pass needs the activations of the last block immediately. Then it drops unnecessary blocks, the most
    expensive first.

    Raises:
        ToolkitError: the budget is too small even if all blocks are recomputed.
    """
    candidates = [block for block in measured.blocks if block.kept_bytes > block.output_bytes]
    candidates.sort(key=lambda block: block.flops / (block.kept_bytes - block.output_bytes))
    chosen: dict[str, int] = {}  # the FLOPs of each
    for block in candidates:
        if measured.peak_bytes(chosen) <= budget_bytes:
            break
        chosen[block.name] = block.flops
    needless: str | None = ""
    while needless is not None:
        chosen.pop(needless, None)
        enough = max(budget_bytes, measured.peak_bytes(chosen) - 1)
        by_cost = sorted(chosen, key=lambda name: -chosen[name])
        needless = next((name for name in by_cost if measured.peak_bytes(chosen.keys() - {name}) <= enough), None)
    if (least := measured.peak_bytes(chosen)) > budget_bytes:
        raise ToolkitError(
            f"expected activations of at most {budget_bytes / 1e9:.3g} GB, got {least / 1e9:.3g} GB, even if all "
            f"{len(measured.blocks)} blocks are recomputed",
            where="train.activation_budget_gb",
            fix=f"set train.activation_budget_gb to {_rounded_up(least / 1e9):g} or more, or reduce train.micro_batch",
        )
    return [block.name for block in measured.blocks if block.name in chosen]


def _rounded_up(value: float) -> float:
    return float(f"{value * 1.01 + 5e-4:.3f}") if value < 100 else float(int(value * 1.01) + 1)


def measure_activations(
    model: nn.Module, forward: Callable[[nn.Module], Tensor], blocks: Collection[str]
) -> Activations:
    """Run a forward pass of the model on the meta device, and return the activations that its backward pass needs.

    Measure after the tensor-parallel split and before sharding, because gathered parameters would count as activations.

    Raises:
        ToolkitError: the model reads values of tensors.
    """
    twin, meter, flops = on_meta(model), TensorMeter("meta"), FlopCounterMode(display=False)
    before: dict[str, tuple[int, int]] = {}
    found: list[BlockActivations] = []

    def enter(name: str) -> None:
        before[name] = meter.used(), flops.get_total_flops()

    def leave(name: str, output: Any) -> None:
        used, done = before[name]
        size = bytes_on(torch.device("meta"), [one for one in tree_leaves(output) if isinstance(one, Tensor)])
        found.append(BlockActivations(name, meter.used() - used, size, flops.get_total_flops() - done))

    for name in blocks:
        block = twin.get_submodule(name)
        block.register_forward_pre_hook(lambda *_, name=name: enter(name))
        block.register_forward_hook(lambda *given, name=name: leave(name, given[-1]))
    refused = on_shapes_alone(
        model, "cannot be measured, because it does not run on the meta device", where="train.recompute",
        fix='choose "every" or "selective", or create tensors on the device of the input and never branch on values',
    )  # fmt: skip
    with refused, meter.counting, flops:
        loss = forward(twin)
        kept = meter.used()
        del loss
    return Activations(found, max(0, kept - sum(block.kept_bytes for block in found)))
