"""One optimizer step: accumulated gradients, one exchange, clipping, the update, the loss of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.parallel.distribute import DistributedModel
from toolkit.parallel.passes import MicroBatch
from toolkit.train.schedule import Schedule

# Mean loss of the samples of one micro-batch, a scalar with a gradient, from the model's outputs and the targets.
LossOf = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Stepped:
    """What a step did. The tensors are scalars, left on the device: reading them there would wait for it.

    `loss` is the mean over the global batch, `grad_norm` the gradient's 2-norm before clipping, `rate` the
    learning rate used. `asked` sums what the ranks ask for (`World.stop_asked`).
    """

    loss: Tensor
    asked: Tensor
    grad_norm: Tensor
    rate: float


@dataclass(frozen=True)
class OptimizerStep:
    """How a step is taken; `take` takes one. Ranks may hold shares of different sizes, but not empty ones.

    `loss_of` gives the mean loss of a micro-batch from the model's outputs and the targets. `batch` is the number of
    samples of all ranks together. `clip_norm` 0 is off.
    """

    model: DistributedModel
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    loss_of: LossOf
    autocast: torch.autocast
    batch: int
    clip_norm: float

    def take(self, micro_batches: Sequence[MicroBatch], asked: int = 0) -> Stepped:
        """Take a step on all ranks; `asked` is what this rank asks for."""
        rate = self.schedule.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums, exchange = self._accumulate(micro_batches, asked)
        norm = self.model.clip(self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.advance()
        exchange.wait()
        return Stepped(sums[0], sums[1], norm, rate)

    def rehearse(self, micro_batch: MicroBatch) -> None:
        """Passes whose gradients are thrown away, before the streams are seeded or restored.

        What is chosen by measurement is chosen in them. DDP lays out its buckets anew after the first backward pass, and the place of a gradient in its
        bucket decides the order in which ranks are summed. Without this, the first step after a resume
        differs in the last bits from the same step of a run that was not cut.
        """

        def once() -> None:
            self._accumulate([micro_batch], False)[1].wait()
            self.optimizer.zero_grad(set_to_none=True)

        self.model.passes.prepare(once)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], asked: int) -> tuple[Tensor, dist.Work]:
        """Gradients of the global mean loss, exchanged once; and the sums of loss and `asked`, still under way.

        The sums travel while the last backward pass runs, which hides their latency; a rank that sees no loss sends
        them when it has done its passes.
        """
        sums = torch.tensor([0.0, asked], dtype=torch.float64, device=micro_batches[0][0].device)
        exchange: list[dist.Work] = []
        losses = 0

        def heard(part: Tensor) -> None:
            nonlocal losses
            losses += 1
            if self.model.counts_loss:
                sums[0] += part
            if losses == len(micro_batches):
                exchange.append(_started(sums))

        self.model.run(micro_batches, self._part, heard, self.autocast)
        return sums, exchange[0] if exchange else _started(sums)

    def _part(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What a micro-batch adds to the mean over the global batch."""
        return self.loss_of(outputs, targets).float() * (len(targets) / self.batch)


def _started(sums: Tensor) -> dist.Work:
    work = dist.all_reduce(sums, async_op=True)
    assert work is not None
    return work
