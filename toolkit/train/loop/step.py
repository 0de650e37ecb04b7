"""One optimizer step: accumulate gradients, reduce them once, clip, update, and reduce the loss over all ranks."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.comm.reductions import backend_all_reduce
from toolkit.metrics.step_profile import OPTIMIZER
from toolkit.parallel.distribute import DistributedModel
from toolkit.parallel.passes import MicroBatch
from toolkit.train.average import WeightAverage
from toolkit.train.guard import GO_ON, LossGuard, StepDecision
from toolkit.train.memory.offload_gradients import OffloadedGradients
from toolkit.train.memory.streamed_optimizer import StreamedOptimizer
from toolkit.train.optim.adascale import AdaScale, PartGradients
from toolkit.train.optim.precision import agree_found_inf, found_inf_of
from toolkit.train.optim.rate_scaling import LearningRate

# Mean loss of the samples of one micro-batch, a scalar with a gradient, from the model's outputs and the targets.
LossOf = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Stepped:
    """The result of a step. Tensors are scalars that stay on the device, because reading them would synchronize.

    `loss` is the mean over the global batch, `grad_norm` the 2-norm of the gradient before clipping, `rate` the
    learning rate. `asked` is the sum of the ranks' stop requests (`World.stop_asked`), `skipped` the sum of replaced
    samples. `decision` comes from the guard; unless it is "go_on", the weights are unchanged. `experts` is the result of
    `Balancing.end`.
    """

    loss: Tensor
    asked: Tensor
    skipped: Tensor
    grad_norm: Tensor
    rate: float
    decision: StepDecision = GO_ON
    experts: Tensor | None = None


@dataclass(frozen=True)
class OptimizerStep:
    """Performs optimizer steps with `take`. The number of samples may differ between ranks, but must not be 0.

    Args:
        model, optimizer: with the parameters of this rank.
        schedule: the learning-rate schedule.
        loss_of: returns the mean loss of a micro-batch from the model's outputs and the targets.
        autocast: the context of forward passes.
        batch: samples per step over all ranks.
        clip_norm: maximum norm of the gradient; 0 disables clipping.
        scaler: scales the loss, for fp16.
        average: the weight average, updated after each step.
        parts: records the gradient norms of single micro-batches, which AdaScale compares.
        guard: judges each step before its update, which must then wait for the loss and norm of all ranks.
        gradients: the gradients of the model, if they are outside of its parameters.
        weight_of: returns the weight of a micro-batch in the mean loss from its targets; by default, the number of samples.
    """

    model: DistributedModel
    optimizer: torch.optim.Optimizer
    schedule: LearningRate
    loss_of: LossOf
    autocast: torch.autocast
    batch: int
    clip_norm: float
    scaler: torch.amp.GradScaler | None = None
    average: WeightAverage | None = None
    guard: LossGuard | None = None
    parts: PartGradients | None = None
    gradients: OffloadedGradients | None = None
    weight_of: Callable[[Tensor], Any] = len

    def take(
        self, micro_batches: Sequence[MicroBatch], asked: int = 0, *, skipped: int = 0, step: int = 0, samples: int = 0
    ) -> Stepped:
        """Perform a step on all ranks.

        Args:
            asked: the stop request of this rank.
            skipped: the number of replaced samples that this rank reports.
            step, samples: number and first global sample of this step, for the guard.

        Raises:
            ToolkitError: the run exceeds the guard's limit of bad steps.
        """
        with self._updating(micro_batches):
            sums, exchange = self._accumulate(micro_batches, asked, skipped)
        with self.model.profile.phase(OPTIMIZER):
            norm = self._clipped()
            decision = GO_ON
            if self.guard is not None:
                exchange.wait()
                said = self._norm_to_judge(norm)
                decision = self.guard.judge(step, float(sums[0]), range(samples, samples + self.batch), said)
            if self.parts is not None and isinstance(self.schedule, AdaScale):
                self._compare_parts(self.schedule, self.parts, len(micro_batches[0][0]), norm, keep=decision is GO_ON)
            rate = self.schedule.rate()
            updated = self._update(rate, keep=decision is GO_ON)
            self.optimizer.zero_grad(set_to_none=True)
        self.schedule.advance()
        exchange.wait()
        experts = self.model.experts.end() if self.model.experts and updated else None
        return Stepped(sums[0], sums[1], sums[2], norm, rate, decision, experts)

    def _updating(self, micro_batches: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """Return the context in which offloaded parameters are updated in the backward pass, if nothing must precede that."""
        waits = self.clip_norm or self.guard is not None or len(micro_batches) > 1
        if waits or self.gradients is None or not isinstance(self.optimizer, StreamedOptimizer):
            return nullcontext()
        self._set_rate(self.schedule.rate())
        return self.optimizer.updating()

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _clipped(self) -> Tensor:
        """Clip the gradient of the step; return its norm before clipping, without the loss scale."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            agree_found_inf(self.scaler, self.optimizer)
        return self.model.clip(self.clip_norm) if self.gradients is None else self.gradients.clip(self.clip_norm)

    def _norm_to_judge(self, norm: Tensor) -> float | None:
        """Return the largest norm of the ranks, which must reach the same decision: their sums differ, or with local SGD all.

        Return None for an fp16 overflow: the scaler then skips the step and decreases the scale.
        """
        known = norm.detach().double()
        backend_all_reduce(known, "max", None)
        said = float(known)
        return None if self.scaler is not None and not math.isfinite(said) else said

    def _compare_parts(
        self, schedule: AdaScale, parts: PartGradients, samples: int, norm: Tensor, *, keep: bool
    ) -> None:
        """Pass the gradient norms of this step's micro-batches to AdaScale; discard those of a bad step."""
        if not keep:
            parts.forget()
            return
        share = samples / self.batch * self.model.mesh.data_size  # `data_size`, because the all-reduce averages
        square, number = parts.mean_square(share)
        schedule.observe(square, float(norm) ** 2, number)

    def _update(self, rate: float, *, keep: bool) -> bool:
        """Update the weights if the guard accepts the step (`keep`); return whether they have changed, the same on all ranks."""
        self._set_rate(rate)
        # Waits for the device only where something else depends on the step.
        depends = self.model.compression is not None or self.model.experts is not None
        overflowed = depends and self.scaler is not None and bool(found_inf_of(self.scaler, self.optimizer))
        if self.model.compression is not None and (overflowed or not keep):
            self.model.compression.kept.discard()
        if keep:
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
            if self.average is not None:
                self.average.update(self.model.module)
        if self.scaler is not None:
            self.scaler.update()
        return keep and not overflowed

    def rehearse(self, micro_batch: MicroBatch) -> None:
        """Run forward and backward passes and discard their gradients, before random streams are seeded or restored.

        Settings are chosen by measurement in these passes. DDP rearranges its buckets after the first backward pass,
        and the position of a gradient in its bucket determines the order of sums. Without a rehearsal, the first step
        after a resume would differ in the last bits from the same step of an uninterrupted run.
        """

        def once() -> None:
            self._accumulate([micro_batch], 0, 0)[1].wait()
            self.optimizer.zero_grad(set_to_none=True)
            if self.parts is not None:
                self.parts.forget()

        self.model.passes.prepare(once)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], asked: int, skipped: int) -> tuple[Tensor, dist.Work]:
        """Accumulate gradients of the global mean loss, and start an all-reduce of loss, `asked` and `skipped`.

        Returns the sums and the pending all-reduce, whose latency the last backward pass hides; a rank without a loss
        starts it after its passes.
        """
        device = micro_batches[0][0].device
        sums = torch.tensor([0.0, asked, skipped], dtype=torch.float64, device=device)
        exchange: list[dist.Work] = []
        losses = 0
        if self.scaler is not None:  # a rank without a loss needs the scale, too
            self.scaler.scale(torch.zeros((), device=device))

        if self.model.experts:
            scale = self.scaler.get_scale() if self.scaler is not None else 1.0
            mesh = self.model.mesh
            self.model.experts.begin(self.batch * mesh.sizes["cp"], scale * mesh.gradient_size, len(micro_batches))
        total = self._total_weight(micro_batches)

        def part_of(outputs: Tensor, targets: Tensor) -> Tensor:
            """Return what a micro-batch contributes to the mean loss of the global batch."""
            part = self.loss_of(outputs, targets).float() * (self.weight_of(targets) / total)
            if self.parts is not None:
                self.parts.begin()
            return part if self.scaler is None else self.scaler.scale(part)

        def heard(part: Tensor) -> None:
            nonlocal losses
            losses += 1
            if self.model.counts_loss:
                sums[0] += part if self.scaler is None else part / self.scaler.get_scale()
            if losses == len(micro_batches):
                exchange.append(_started(sums))

        self.model.run(micro_batches, part_of, heard, self.autocast)
        return sums, exchange[0] if exchange else _started(sums)

    def _total_weight(self, micro_batches: Sequence[MicroBatch]) -> float | Tensor:
        """Return the weight of the global batch. Collective if weights depend on targets."""
        if self.weight_of is len:
            return self.batch * self.model.mesh.sizes["cp"]  # each rank that shares sequences adds their weight
        repeats = (
            dist.get_world_size() / self.model.mesh.data_size
        )  # ranks with parts of one model have the same targets
        total: Tensor = sum(self.weight_of(targets) for _, targets in micro_batches) / repeats
        dist.all_reduce(total)
        return total.clamp_min(1)


def _started(sums: Tensor) -> dist.Work:
    work = dist.all_reduce(sums, async_op=True)
    assert work is not None
    return work
