"""The forward and backward passes of one optimizer step, which differ between strategies."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from toolkit.metrics.phases import Profile
from toolkit.metrics.step_profile import FORWARD
from toolkit.world.waits import backward

__all__ = ["Heard", "MicroBatch", "PartOf", "PassesInTurn"]

# The inputs and targets of the model.
MicroBatch = tuple[Tensor, Tensor]
# Returns the contribution of a micro-batch to the mean loss of the step, a scalar, from outputs and targets.
PartOf = Callable[[Tensor, Tensor], Tensor]
# Called with each of these contributions as early as the strategy allows.
Heard = Callable[[Tensor], None]


class Passes(Protocol):
    """Runs forward and backward passes, which leave the gradient of the mean loss over all ranks in `grad`."""

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        """Run the forward pass of all micro-batches of this rank, in `precision`, and the backward pass. Collective.

        `heard` is called once per micro-batch, on ranks with a loss.
        """
        ...

    def prepare(self, once: Callable[[], None]) -> None:
        """Run trial steps before the first real step, to make choices that depend on the first passes. Collective.

        Args:
            once: runs the passes of one step and discards the gradients.
        """
        ...


@dataclass(frozen=True)
class PassesInTurn:
    """Runs micro-batches through the whole model one by one; gradients are reduced over ranks during the last one.

    Args:
        module: called with the inputs.
        factor: the number by which the reduction divides the sum of gradients.
        between: a context in which a backward pass defers the reduction.
        profile: records the phases "forward" and "backward", and their communication.
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
