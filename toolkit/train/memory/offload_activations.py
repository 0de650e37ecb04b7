"""Keep the activations that blocks save for their backward pass in a tier; those of the previous block are read ahead."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from toolkit.train.memory.local_parts import like_parameter, local_of
from toolkit.train.memory.tier import Slot, Tier, Transfer, is_dense, wait_for

__all__ = ["offload_activations"]

_LEAST_BYTES = 1 << 16  # smaller activations cost more to move than they free
_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(eq=False)
class _Saved:
    """An activation in the tier; its slot is free again when autograd drops it."""

    owner: "_Activations"
    kind: _Kind
    slot: Slot
    like: Tensor  # without memory: the type, the device, and the sharding of the activation
    near: Tensor | None = None  # read ahead

    def __del__(self) -> None:
        self.owner.free[self.kind].append(self.slot)

    def read(self) -> None:
        if self.near is None:
            shape, strides, dtype = self.kind
            self.near = torch.empty_strided(shape, strides, dtype=dtype, device=self.like.device)
            self.owner.tier.read(self.slot, self.near)

    def value(self) -> Tensor:
        self.read()
        near, self.near = self.near, None
        assert near is not None and self.slot.last is not None
        self.slot.last.wait()
        return like_parameter(self.like, near.to(self.like.dtype))


@dataclass
class _Activations:
    """The state of the hooks of one model."""

    tier: Tier
    stored_as: torch.dtype | None
    free: dict[_Kind, list[Slot]] = field(default_factory=lambda: defaultdict(list))
    least_elements: int = 0  # of a tensor that may be rounded: the input of the block
    own: set[int] = field(default_factory=set)  # the storages of parameters and buffers of that block
    known: dict[Any, tuple[Tensor, _Saved]] = field(default_factory=dict)  # of the block whose forward pass runs
    saved: dict[int, list[ReferenceType[_Saved]]] = field(default_factory=lambda: defaultdict(list))  # by block
    writes: deque[list[Transfer]] = field(default_factory=deque)  # by block
    hooks: list[saved_tensors_hooks] = field(default_factory=list)

    def enter(self, number: int, block: nn.Module, given: tuple[Any, ...]) -> None:
        self.least_elements = max((one.numel() for one in given if isinstance(one, Tensor)), default=0)
        self.await_writes(1)  # the memory of two blocks at most waits to be written
        self.writes.append([])
        # FSDP2 has gathered the parameters of the block by now, and releases them again below the same tensors.
        self.own = {_storage(tensor) for tensor in (*block.parameters(), *block.buffers())}
        hooks = saved_tensors_hooks(partial(self.pack, number), _unpack)
        hooks.__enter__()
        self.hooks.append(hooks)

    def leave(self, *_: Any) -> None:
        self.hooks.pop().__exit__()
        self.known.clear()

    def await_writes(self, most: int) -> None:
        while len(self.writes) > most:
            wait_for(self.writes.popleft())

    def read_ahead(self, number: int, *_: Any) -> None:
        self.await_writes(0)
        self.saved.pop(number, None)
        for reference in self.saved.pop(number - 1, ()):
            if (saved := reference()) is not None:
                saved.read()

    def pack(self, number: int, tensor: Tensor) -> "Tensor | _Saved":
        whole, tensor = tensor, local_of(tensor)
        if _storage(tensor) in self.own or tensor.nbytes < _LEAST_BYTES or not is_dense(tensor):
            return whole
        key = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), whole._version)
        if key not in self.known:
            # Statistics of rows, such as those of softmax, are small, and rounding them costs most accuracy.
            lossy = (
                self.stored_as is not None and tensor.dtype == torch.float32 and tensor.numel() >= self.least_elements
            )
            stored = tensor.to(self.stored_as) if lossy else tensor
            kind = (stored.shape, stored.stride(), stored.dtype)
            slot = self.free[kind].pop() if self.free[kind] else self.tier.slot(stored)
            saved = _Saved(self, kind, slot, like_parameter(whole, tensor.new_empty(0)))
            self.writes[-1].append(self.tier.write(slot, stored))
            self.saved[number].append(ref(saved))
            self.known[key] = (tensor, saved)  # the tensor stays alive, so that no other one gets its address
        return self.known[key][1]


def offload_activations(blocks: Sequence[nn.Module], tier: Tier, stored_as: torch.dtype | None = None) -> None:
    """Keep activations of these blocks in a tier between their forward and backward passes.

    Args:
        stored_as: a narrower type for fp32 activations; gradients are then no longer the same. None keeps all bits.
    """
    state = _Activations(tier, stored_as)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(state.enter, number))
        block.register_forward_hook(state.leave, always_call=True)
        block.register_full_backward_pre_hook(partial(state.read_ahead, number))


def _unpack(saved: "Tensor | _Saved") -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.value()


def _storage(tensor: Tensor) -> int:
    return local_of(tensor).untyped_storage()._cdata
