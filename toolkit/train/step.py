"""One optimizer step: accumulated gradients, one exchange, clipping, the update, the loss of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.train.schedule import Schedule

# Mean loss of the samples of one micro-batch, a scalar with a gradient.
LossOf = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


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

    `batch` is the number of samples of all ranks together. `clip_norm` 0 is off.
    """

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    loss_of: LossOf
    autocast: torch.autocast
    batch: int
    clip_norm: float

    def take(self, micro_batches: Sequence[tuple[Tensor, Tensor]], asked: int = 0) -> Stepped:
        """Take a step on all ranks; `asked` is what this rank asks for."""
        rate = self.schedule.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums, exchange = self._accumulate(micro_batches, asked)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.advance()
        exchange.wait()
        return Stepped(sums[0], sums[1], norm, rate)

    def rehearse(self, micro_batch: tuple[Tensor, Tensor]) -> None:
        """One backward pass whose gradients are thrown away, before the streams are seeded or restored.

        DDP lays out its buckets anew after the first backward pass, and the place of a gradient in its
        bucket decides the order in which ranks are summed. Without this, the first step after a resume
        differs in the last bits from the same step of a run that was not cut.
        """
        self._accumulate([micro_batch], False)[1].wait()
        self.optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, micro_batches: Sequence[tuple[Tensor, Tensor]], asked: int) -> tuple[Tensor, dist.Work]:
        """Gradients of the global mean loss, exchanged once; and the sums of loss and `asked`, still under way.

        DDP takes the mean of the ranks' gradients, so each rank's part of the global mean is scaled by the
        number of ranks. The sums travel while the last backward pass runs, which hides their latency.
        """
        ranks = dist.get_world_size()
        sums = torch.tensor([0.0, asked], dtype=torch.float64, device=micro_batches[0][0].device)
        for micro_batch in micro_batches[:-1]:
            with self.model.no_sync():
                part = self._part(micro_batch)
                (part * ranks).backward()
            sums[0] += part.detach()
        part = self._part(micro_batches[-1])
        sums[0] += part.detach()
        exchange = dist.all_reduce(sums, async_op=True)
        (part * ranks).backward()
        return sums, exchange

    def _part(self, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        """This micro-batch's contribution to the mean over the global batch."""
        with self.autocast:
            mean = self.loss_of(self.model, micro_batch)
        return mean.float() * (len(micro_batch[0]) / self.batch)
