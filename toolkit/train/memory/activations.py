"""What each block of a model keeps for its backward pass, and what it would cost to compute it again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from toolkit.errors import ToolkitError
from toolkit.parallel.materialise import buffers_on_meta


@dataclass(frozen=True)
class BlockActivations:
    """Of one block, on one micro-batch.

    `saved_bytes` are kept for the backward pass without recomputation, `input_bytes` with it; `flops` are those of its
    forward pass, which recomputation adds.
    """

    name: str
    saved_bytes: int
    input_bytes: int
    flops: int


@dataclass(frozen=True)
class Activations:
    """Of a model: its blocks in order, and `other_bytes` outside of them, such as logits."""

    blocks: tuple[BlockActivations, ...]
    other_bytes: int

    def peak_bytes(self, recomputed: Collection[str]) -> int:
        """Most bytes at a time when these blocks recompute.

        That is at the end of the forward pass, or where the backward pass has all of one block again and still what
        the blocks before it keep. What is outside of blocks counts throughout.
        """
        held, peak = self.other_bytes, self.other_bytes
        for block in self.blocks:
            if block.name in recomputed:
                peak = max(peak, held + block.input_bytes + block.saved_bytes)
                held += block.input_bytes
            else:
                held += block.saved_bytes
        return max(peak, held)


def cheapest(measured: Activations, budget_bytes: float) -> list[str]:
    """The blocks to recompute so that the peak is within the budget, at the fewest FLOPs that a greedy choice finds.

    Blocks that free most bytes for each FLOP come first, of equal ones the first of the model, as the last one's
    activations are wanted again at once. Then those that are not needed after all are taken back, the dearest first.

    Raises:
        ToolkitError: the budget is missed even if all blocks recompute.
    """
    candidates = [block for block in measured.blocks if block.saved_bytes > block.input_bytes]
    candidates.sort(key=lambda block: block.flops / (block.saved_bytes - block.input_bytes))
    chosen: dict[str, BlockActivations] = {}
    for block in candidates:
        if measured.peak_bytes(chosen) <= budget_bytes:
            break
        chosen[block.name] = block
    _take_back(chosen, lambda rest: measured.peak_bytes(rest) < measured.peak_bytes(chosen))
    least = measured.peak_bytes(chosen)
    if least > budget_bytes:
        raise ToolkitError(
            f"activations take {least / 1e9:.3g} GB when the {len(measured.blocks)} blocks recompute, and the budget is "
            f"{budget_bytes / 1e9:.3g} GB",
            where="train.activation_budget_gb",
            fix=f"set it to {_rounded_up(least / 1e9):g} or more, or take a smaller train.micro_batch",
        )
    _take_back(chosen, lambda rest: measured.peak_bytes(rest) <= budget_bytes)
    return [block.name for block in measured.blocks if block.name in chosen]


def _take_back(chosen: dict[str, BlockActivations], is_good: Callable[[set[str]], bool]) -> None:
    """Drop blocks as long as it is good to, the dearest first; one may become good to drop by another's going."""
    while True:
        names = sorted(chosen, key=lambda name: -chosen[name].flops)
        needless = next((name for name in names if is_good(chosen.keys() - {name})), None)
        if needless is None:
            return
        del chosen[needless]


def _rounded_up(value: float) -> float:
    return float(f"{value * 1.01 + 5e-4:.3f}") if value < 100 else float(int(value * 1.01) + 1)


def measure_activations(model: nn.Module, forward: Callable[[], Any], blocks: Mapping[str, nn.Module]) -> Activations:
    """Run one forward pass of the model, and count what it keeps for the backward pass.

    Parameters and buffers are not counted, and a storage that is kept twice is counted once, where it was kept first.
    Random streams and buffers (as of batch norm) are as before afterwards. A model with parameters on the meta device is
    measured there, its buffers as well. Measure after tensor parallel ranks have split the model, and before it is
    sharded: gathered parameters would be counted.
    """
    with buffers_on_meta(model) if is_on_meta(model) else nullcontext():
        return _measure(model, forward, blocks)


def is_on_meta(model: nn.Module) -> bool:
    """Whether the model has no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def _measure(model: nn.Module, forward: Callable[[], Any], blocks: Mapping[str, nn.Module]) -> Activations:
    own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    buffers = [buffer.clone() for buffer in model.buffers()]
    count = _Count(own)
    flops = FlopCounterMode(display=False)
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        for name, block in blocks.items():
            before = block.register_forward_pre_hook(partial(count.enter, name, flops), with_kwargs=True)
            after = block.register_forward_hook(partial(count.leave, name, flops), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(flops)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(count.save, lambda nothing: nothing))
        kept_alive = forward()
    del kept_alive
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)
    return count.result(list(blocks))


def saved_bytes(forward: Callable[[], Any], model: nn.Module) -> int:
    """Bytes that one forward pass of the model keeps for its backward pass, parameters and buffers not counted."""
    return measure_activations(model, forward, {}).other_bytes


@dataclass
class _Count:
    """Hooks of one forward pass. A storage is kept alive by its tensor, so that no later one gets its address."""

    own: set[int]
    seen: dict[int, Tensor] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)
    saved: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    at_entry: dict[str, int] = field(default_factory=dict)

    def enter(self, name: str, flops: FlopCounterMode, _: nn.Module, given: Any, named: Any) -> None:
        self.inside.append(name)
        tensors = {_storage(one): one for one in _tensors([given, named])}
        self.inputs[name] = self.inputs.get(name, 0) + sum(
            _bytes(one) for storage, one in tensors.items() if storage not in self.own
        )
        self.at_entry[name] = flops.get_total_flops()

    def leave(self, name: str, flops: FlopCounterMode, *_: Any) -> None:
        self.inside.pop()
        self.flops[name] = self.flops.get(name, 0) + flops.get_total_flops() - self.at_entry[name]

    def save(self, tensor: Tensor) -> None:
        """Keeps nothing in the graph, as no backward pass follows: a node that kept its own output would stay for ever."""
        storage = _storage(tensor)
        if storage not in self.own and storage not in self.seen:
            self.seen[storage] = tensor.detach()
            name = self.inside[-1] if self.inside else ""
            self.saved[name] = self.saved.get(name, 0) + _bytes(tensor)

    def result(self, names: Sequence[str]) -> Activations:
        of = [
            BlockActivations(name, self.saved.get(name, 0), self.inputs.get(name, 0), self.flops.get(name, 0))
            for name in names
        ]
        return Activations(tuple(of), self.saved.get("", 0))


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    inner = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ()
    return [tensor for one in inner for tensor in _tensors(one)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int:
    """Which storage it is: addresses would do, but for the "meta" device, which has none."""
    return StorageWeakRef(_local(tensor).untyped_storage()).cdata


def _bytes(tensor: Tensor) -> int:
    """Of the whole storage: a view keeps all of it."""
    return _local(tensor).untyped_storage().nbytes()
