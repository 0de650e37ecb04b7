"""Keep the gradients of a step in a tier: a backward pass then needs memory for the newest ones only."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from toolkit.parallel.clipping import norm_of_parts, part_of_norm
from toolkit.train.memory.local_parts import like_parameter, local_of
from toolkit.train.memory.tier import Slot, Tier, Transfer

__all__ = ["OffloadedGradients"]

_MOST_WRITES = 2  # of gradients under way


class OffloadedGradients:
    """Takes each gradient from its parameter as soon as it is complete, and keeps it in a tier.

    With FSDP2 this is the reduced gradient of this rank's shard. Gradients of further micro-batches are added. `update`
    gets each complete gradient instead of the tier, if it is set. `parameters` are those with gradients, in model order.
    """

    update: Callable[[nn.Parameter], None] | None = None

    def __init__(self, parameters: Iterable[nn.Parameter], tier: Tier) -> None:
        self._tier = tier
        self._slots: dict[nn.Parameter, Slot] = {}
        self._norms: dict[nn.Parameter, Tensor] = {}  # of the gradients in the tier
        self._updated: set[nn.Parameter] = set()  # those whose gradients `update` got
        self._writes: deque[Transfer] = deque()
        self._clipped_to: tuple[float, Tensor] | None = None
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: nn.Parameter) -> None:
        gradient = local_of(parameter.grad)
        if self.update is not None:
            self._norms[parameter] = part_of_norm(gradient)
            self._updated.add(parameter)
            self.update(parameter)
            parameter.grad = None
            return
        if parameter not in self._slots:
            self._slots[parameter] = self._tier.slot(gradient)
        slot = self._slots[parameter]
        if parameter in self._norms:
            before = torch.empty_like(gradient)
            self._tier.read(slot, before).wait()
            gradient = before.add_(gradient)
        self._norms[parameter] = part_of_norm(gradient)
        self._await_writes(_MOST_WRITES - 1)
        self._writes.append(self._tier.write(slot, gradient))
        parameter.grad = None

    def is_complete(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has a gradient in this step."""
        return parameter in self._norms

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether the tier has a gradient of this step."""
        return parameter in self._norms and parameter not in self._updated

    def clip(self, max_norm: float) -> Tensor:
        """Return the norm of all gradients; `read` then scales them to `max_norm` (0: no limit). Collective."""
        self._await_writes(0)
        held = [parameter for parameter in self.parameters if parameter in self._norms]
        norm = norm_of_parts([(parameter, self._norms[parameter]) for parameter in held], None)
        self._clipped_to = (max_norm, norm) if max_norm else None
        return norm

    def read(self, parameter: nn.Parameter) -> tuple[Tensor, Transfer] | None:
        """Start to read a gradient; None if the parameter has none in this step."""
        if not self.holds(parameter):
            return None
        gradient = torch.empty_like(local_of(parameter))
        return gradient, self._tier.read(self._slots[parameter], gradient)

    def set_gradients(self, found: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Set the gradients that `read` returned, clipped."""
        for parameter, gradient in found:
            parameter.grad = like_parameter(parameter, gradient)
        if self._clipped_to is not None and found:
            # One by one: gradients of experts are on another mesh than the others.
            clip_grads_with_norm_([parameter for parameter, _ in found], *self._clipped_to, foreach=False)

    def forget(self) -> None:
        """Drop the gradients of this step."""
        self._await_writes(0)
        self._norms, self._clipped_to = {}, None
        self._updated.clear()

    def _await_writes(self, most: int) -> None:
        while len(self._writes) > most:
            self._writes.popleft().wait()
