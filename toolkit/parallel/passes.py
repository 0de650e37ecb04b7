"""The forward and backward passes of one optimizer step, which differ between strategies."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from toolkit.comm.waits import backward
from toolkit.metrics.phases import Profile
from toolkit.metrics.step_profile import FORWARD

__all__ = ["MicroBatch"]

# The inputs and targets of the model.
MicroBatch = tuple[Tensor, Tensor]
# Returns a micro-batch's share of the step's mean loss, a scalar, from the model's outputs and the targets.
PartOf = Callable[[Tensor, Tensor], Tensor]
# Called with each such share as early as the strategy allows.
Heard = Callable[[Tensor], None]


class Passes(Protocol):
    """Leaves the gradient of the mean loss over the samples of all ranks in each parameter's `grad`."""

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        """Run the forward pass of all micro-batches of this rank, in `precision`, and the backward pass. Collective.

        `heard` is called once for each of them, on ranks with a loss.
        """
        ...

    def prepare(self, once: Callable[[], None]) -> None:
        """Settle what the first passes decide, before any counts. Collective.

        Args:
            once: runs the passes of one step, whose gradients are discarded.
        """
        ...


@dataclass(frozen=True)
class PassesInTurn:
    """Passes micro-batches through the whole model one by one; gradients are exchanged with the last one.

    Args:
        module: called with the inputs.
        factor: the number by which the exchange divides the sum of gradients.
        between: a context in which a backward pass defers its exchange.
        profile: has the phases "forward" and "backward", and their communication.
    """

    module: nn.Module
    factor: float
    between: Callable[[], AbstractContextManager[None]]
    profile: Profile = field(default_factory=Profile)

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        for micro_batch in micro_batches[:-1]:
            with self.between():
                self._pass(micro_batch, part_of, heard, precision)
        self._pass(micro_batches[-1], part_of, heard, precision)

    def prepare(self, once: Callable[[], None]) -> None:
        once()

    def _pass(self, micro_batch: MicroBatch, part_of: PartOf, heard: Heard, precision: torch.autocast) -> None:
        inputs, targets = micro_batch
        with self.profile.phase(FORWARD):
            with precision:
                part = part_of(self.module(inputs), targets)
            heard(part.detach())
        backward(part * self.factor, self.profile)
