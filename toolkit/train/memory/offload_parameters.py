"""Keep the parameters of blocks in a tier; each block is on the device only while it computes, and the next one is read.

The memory of a parameter is released and filled again below the same tensor (`UntypedStorage.resize_`), so that autograd,
which keeps references to weights, finds their values when it needs them.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.train.memory.tier import Slot, Tier, Transfer, wait_for

__all__ = ["StreamedParameters"]


class StreamedParameters:
    """Moves the parameters of these blocks out of memory, except those that several modules share.

    Create it once the model has its values: parameters must not be loaded into afterwards.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], tier: Tier) -> None:
        self._tier = tier
        names: dict[nn.Parameter, int] = {}
        for _, parameter in model.named_parameters(remove_duplicate=False):
            names[parameter] = names.get(parameter, 0) + 1
        self._blocks = [[one for one in block.parameters() if names[one] == 1 and one.numel()] for block in blocks]
        self._slots: dict[nn.Parameter, Slot] = {}
        self._reading: dict[nn.Parameter, Transfer] = {}
        self._is_backward = [False] * len(blocks)
        self._awaits_end = False  # of a backward pass
        for parameters in self._blocks:
            for parameter in parameters:
                self._slots[parameter] = tier.slot(parameter.detach())
            wait_for(self.put_away(parameters))
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._forward, number))
            block.register_forward_hook(partial(self._forwarded, number))
            block.register_full_backward_pre_hook(partial(self._backward, number))

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor with the values of a parameter that is out of memory, else the tensor itself."""
        by_storage = {one.untyped_storage()._cdata: slot.kept for one, slot in self._slots.items()}
        return by_storage.get(tensor.untyped_storage()._cdata, tensor)

    def fetch(self, parameters: Iterable[nn.Parameter]) -> list[Transfer]:
        """Start to read those of the parameters that are out of memory."""
        for parameter in parameters:
            slot, storage = self._slots.get(parameter), parameter.untyped_storage()
            if slot is not None and storage.nbytes() == 0:
                storage.resize_(parameter.nbytes)
                self._reading[parameter] = self._tier.read(slot, _memory_of(parameter))
        return [self._reading[one] for one in parameters if one in self._reading]

    def put_away(self, parameters: Iterable[nn.Parameter]) -> list[Transfer]:
        """Write changed parameters, and release their memory."""
        writes = []
        for parameter in parameters:
            if parameter in self._slots:
                writes.append(self._tier.write(self._slots[parameter], parameter.detach().clone()))
                self._release([parameter])
        return writes

    def _release(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in self._reading:
                self._reading.pop(parameter).wait()
            parameter.untyped_storage().resize_(0)

    def _need(self, number: int, following: int) -> None:
        wait_for(self.fetch(self._blocks[number]))
        if 0 <= following < len(self._blocks):
            self.fetch(self._blocks[following])

    def _forward(self, number: int, *_: Any) -> None:
        # Within a backward pass this is recomputation.
        self._need(number, number - 1 if self._is_backward[number] else number + 1)

    def _forwarded(self, number: int, *_: Any) -> None:
        is_next = number + 1 == len(self._blocks) and torch.is_grad_enabled()  # the backward pass starts with it
        if not self._is_backward[number] and not is_next:
            self._release(self._blocks[number])

    def _backward(self, number: int, *_: Any) -> None:
        """Start the backward pass of a block: that of the next one is over."""
        self._end(range(number + 1, len(self._blocks)))
        self._is_backward[number] = True
        self._need(number, number - 1)
        if not self._awaits_end:
            self._awaits_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        self._awaits_end = False
        self._end(range(len(self._blocks)))

    def _end(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._is_backward[number]:
                self._is_backward[number] = False
                self._release(self._blocks[number])


def _memory_of(parameter: nn.Parameter) -> Tensor:
    """Return a tensor with the parameter's memory, but without its version, which autograd checks: its value returns."""
    memory = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return memory.set_(parameter.untyped_storage(), parameter.storage_offset(), parameter.shape, parameter.stride())
