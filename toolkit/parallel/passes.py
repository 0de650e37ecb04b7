"""The forward and backward passes of one optimizer step: what differs between ways to distribute a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from toolkit.comm.waits import backward
from toolkit.metrics.phases import Profile
from toolkit.metrics.step_profile import FORWARD

# What goes into the model, and what it is compared with.
MicroBatch = tuple[Tensor, Tensor]
# The share that a micro-batch has in the mean loss of the step, a scalar, from the model's outputs and the targets.
PartOf = Callable[[Tensor, Tensor], Tensor]
# Is given each such share as soon as the way to pass allows it.
Heard = Callable[[Tensor], None]


class Passes(Protocol):
    """Leaves in every parameter's `grad` the gradient of the mean loss over the samples of all ranks."""

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        """Pass all micro-batches of this rank forward, in `precision`, and backward. Collective.

        `heard` is called once for each of them, on ranks that see a loss.
        """
        ...

    def prepare(self, once: Callable[[], None]) -> None:
        """Settle what settles in the first passes, before any counts. Collective.

        Args:
            once: runs the passes of one step, whose gradients are thrown away.
        """
        ...


@dataclass(frozen=True)
class PassesInTurn:
    """One micro-batch after the other through the whole model; gradients travel with the last one.

    Args:
        module: is called with the inputs.
        factor: by how many ranks the exchange will divide the sum of gradients.
        between: in it, a backward pass leaves to a later one what it can.
        profile: has the phases "forward" and "backward", and what of that is communication.
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
