"""Measure the activations that each block of a model saves for the backward pass, and the cost of recomputing them."""

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
    """Activations of one block for one micro-batch.

    The block keeps `saved_bytes` for its backward pass, or only `input_bytes` if it is recomputed. `flops` are those of
    the forward pass, which recomputation repeats.
    """

    name: str
    saved_bytes: int
    input_bytes: int
    flops: int


@dataclass(frozen=True)
class Activations:
    """Activations of a model: its blocks in order, and `other_bytes` outside of them, such as logits."""

    blocks: tuple[BlockActivations, ...]
    other_bytes: int

    def peak_bytes(self, recomputed: Collection[str]) -> int:
        """Return the peak activation memory in bytes if these blocks are recomputed.

        The peak occurs at the end of the forward pass, or during the backward pass of a recomputed block, together with
        the saved tensors of the blocks before it. Bytes outside of blocks always count.
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
    """Return the blocks to recompute so that the peak fits the budget; a greedy choice keeps their FLOPs low.

    It selects the blocks that free the most bytes per FLOP. Among equal blocks, it prefers early ones, because the
    backward pass needs the activations of the last block immediately. Then it drops unnecessary blocks, the most
    expensive first.

    Raises:
        ToolkitError: the budget is too small even if all blocks are recomputed.
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
            f"expected activations of at most {budget_bytes / 1e9:.3g} GB, got {least / 1e9:.3g} GB, even if all "
            f"{len(measured.blocks)} blocks are recomputed",
            where="train.activation_budget_gb",
            fix=f"set train.activation_budget_gb to {_rounded_up(least / 1e9):g} or more, or reduce train.micro_batch",
        )
    _take_back(chosen, lambda rest: measured.peak_bytes(rest) <= budget_bytes)
    return [block.name for block in measured.blocks if block.name in chosen]


def _take_back(chosen: dict[str, BlockActivations], is_good: Callable[[set[str]], bool]) -> None:
    """Drop unnecessary blocks, the most expensive first; dropping one may make another droppable."""
    while True:
        names = sorted(chosen, key=lambda name: -chosen[name].flops)
        needless = next((name for name in names if is_good(chosen.keys() - {name})), None)
        if needless is None:
            return
        del chosen[needless]


def _rounded_up(value: float) -> float:
    return float(f"{value * 1.01 + 5e-4:.3f}") if value < 100 else float(int(value * 1.01) + 1)


def measure_activations(model: nn.Module, forward: Callable[[], Any], blocks: Mapping[str, nn.Module]) -> Activations:
    """Run one forward pass of the model, and return the activations that it saves for the backward pass.

    Parameters and buffers are not counted; shared storage counts once, for the block that saved it first. Random
    streams and buffers are restored. A model with parameters on the meta device is measured there. Measure after the
    tensor-parallel split and before sharding, because gathered parameters would count as activations.
    """
    with buffers_on_meta(model) if is_on_meta(model) else nullcontext():
        return _measure(model, forward, blocks)


def is_on_meta(model: nn.Module) -> bool:
    """Return True if a parameter is on the meta device, where it uses no memory."""
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
    """Return the bytes that one forward pass saves for its backward pass, without parameters and buffers."""
    return measure_activations(model, forward, {}).other_bytes


@dataclass
class _Count:
    """Counts saved tensors in hooks of one forward pass; keeps them alive, so that no address is reused."""

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
        """Count a saved tensor; keep None in the graph, because a node that refers to its own output would leak."""
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
    """Return an identifier of the storage; tensors on the meta device have no addresses."""
    return StorageWeakRef(_local(tensor).untyped_storage()).cdata


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of the whole storage, because a view keeps all of it."""
    return _local(tensor).untyped_storage().nbytes()
