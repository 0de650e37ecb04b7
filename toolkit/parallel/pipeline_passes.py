"""Run the forward and backward passes of an optimizer step through a pipeline, with one of torch's schedules.

Schedules (D. Narayanan et al., SC 2021, arXiv:2104.04473; P. Qi et al., "Zero Bubble", ICLR 2024, arXiv:2401.10241):

    gpipe        all forward passes, then all backward passes; a rank keeps the activations of all micro-batches.
    1f1b         alternates one forward and one backward pass; a rank keeps as many activations as stages follow.
    interleaved  1f1b with several stages per rank: less idle time, more messages.
    zero_bubble  splits backward passes in two; the half for the weights, on which no rank depends, fills idle time.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from toolkit.config.train import SEVERAL_STAGES, ParallelTable, micro_batch_fix, no_micro_batches
from toolkit.errors import ToolkitError
from toolkit.metrics.phases import Profile
from toolkit.metrics.step_profile import BACKWARD, BUBBLE, COMMUNICATION, FORWARD
from toolkit.parallel.passes import Heard, MicroBatch, PartOf
from toolkit.parallel.sharded import reduce_sharded_parts
from toolkit.world.waits import waits_as

__all__ = ["PipelinePasses"]

T = TypeVar("T")
# Called with the number of a micro-batch and its outputs.
HeardOutputs = Callable[[int, Tensor], None]

Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble
_OF_ONE_STAGE: dict[str, type[ScheduleGPipe | Schedule1F1B]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_OF_SEVERAL: dict[str, type[ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


@dataclass(frozen=True)
class Tie:
    """A parameter that this rank shares with a stage on rank `peer` of the pipeline group.

    `counts` is true on the one of the two ranks that includes it in the gradient norm.
    """

    name: str
    parameter: nn.Parameter
    peer: int
    counts: bool


class _ProfiledStage(PipelineStage):
    """A stage whose passes are phases of the profile; waits in them are communication, those between them the bubble."""

    def __init__(self, profile: Profile, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._profile = profile

    def forward_one_chunk(self, *given: Any, **named: Any) -> Any:
        with waits_as(COMMUNICATION), self._profile.phase(FORWARD):
            return super().forward_one_chunk(*given, **named)

    def backward_one_chunk(self, *given: Any, **named: Any) -> Any:
        with waits_as(COMMUNICATION), self._profile.phase(BACKWARD):
            return super().backward_one_chunk(*given, **named)

    def backward_weight_one_chunk(self, *given: Any, **named: Any) -> Any:
        with waits_as(COMMUNICATION), self._profile.phase(BACKWARD):
            return super().backward_weight_one_chunk(*given, **named)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        with waits_as(COMMUNICATION):
            super().perform_reduce_grad(grad_scale_factor)
            reduce_sharded_parts(self.submod)


class PipelinePasses:
    """Runs equal micro-batches through the stages of this rank; implements `Passes`.

    For every value of `[parallel] zero`, gradients accumulate unsharded over the micro-batches and are reduced once.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        stages: int,
        group: dist.ProcessGroup,
        settings: ParallelTable,
        factor: float,
        device: str,
        ties: Sequence[Tie],
    ) -> None:
        """Prepare the stages of this rank.

        Args:
            modules: the stages of this rank by number, out of `stages`. Their `forward` runs in the step's precision.
            factor: the number by which the reduction divides the sum of gradients.
        """
        self.ties = tuple(ties)
        self._modules, self._stages, self._group = modules, stages, group
        self._settings, self._factor, self._device = settings, factor, torch.device(device)
        self._first, self._last = 0 in modules, stages - 1 in modules
        self.profile = Profile()
        # Gives gradients the placement of their parameters, before the gradients of tied parameters are summed.
        self.settle: Callable[[], None] = lambda: None
        self._schedules: dict[object, Schedule] = {}
        self._precision = torch.autocast(self._device.type, enabled=False)
        self._part_of: PartOf | None = None
        self._parts: list[Tensor] = []
        self._evaluations: dict[object, tuple[list[Any], Schedule]] = {}
        self._heard_outputs: HeardOutputs | None = None
        # On any error, torch logs the whole schedule on every rank, which hides the cause in thousands of lines.
        logging.getLogger(ScheduleGPipe.__module__).setLevel(logging.CRITICAL)
        for module in modules.values():
            # Not wrapped in a module, because torch detects a sharded stage by its type.
            module.forward = self._in_precision(module.forward)

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        self._check(micro_batches)
        self._precision, self._part_of = precision, part_of
        inputs = torch.cat([inputs for inputs, _ in micro_batches]) if self._first else None
        targets = torch.cat([targets for _, targets in micro_batches]) if self._last else None
        given = () if inputs is None else (inputs,)
        schedule = self._schedule(micro_batches)
        with waits_as(BUBBLE):
            schedule.step(*given, target=targets, return_outputs=False)
        # Only the last calls count: before the first step, torch calls the loss once more to get its shape.
        for part in self._parts[-len(micro_batches) :]:
            heard(part)
        self._parts.clear()
        self.settle()
        self._sum_ties()

    @property
    def evaluated_together(self) -> int:
        """The number of micro-batches per `evaluate`: enough to keep ranks busy; the last rank stores all outputs."""
        return 2 * dist.get_world_size(self._group)

    def evaluate(self, inputs: Sequence[Tensor], heard: HeardOutputs) -> None:
        """Run forward passes of equal micro-batches, without autocast; the last stage receives the outputs. Collective.

        Args:
            inputs: the inputs of `evaluated_together` micro-batches.
        """
        self._precision = torch.autocast(self._device.type, enabled=False)

        self._heard_outputs = heard
        stages, schedule = self._evaluation(inputs)
        given = (torch.cat(list(inputs)),) if self._first else ()
        schedule.eval(*given, target=torch.arange(len(inputs)), return_outputs=False)
        for stage in stages:
            stage.clear_runtime_states()  # frees as much memory as the outputs use

    def from_last_stage(self, value: T | None) -> T | None:
        """Return the last stage's `value` on all ranks of this pipeline. Collective."""
        box = [value]
        last = dist.get_world_size(self._group) - 1
        dist.broadcast_object_list(box, group=self._group, group_src=last, device=self._device)
        return box[0]

    def prepare(self, once: Callable[[], None]) -> None:
        """Do nothing: a pipeline makes no choices by trial, and cannot run a single micro-batch."""

    def _schedule(self, micro_batches: Sequence[MicroBatch]) -> Schedule:
        """Return the schedule for this number and shape of micro-batches; stages of a new one exchange shapes."""
        inputs, _ = micro_batches[0]
        training = next(iter(self._modules.values())).training
        key = (len(micro_batches), inputs.shape, inputs.dtype, training, self._precision.fast_dtype)
        if key not in self._schedules:
            stages = self._new_stages(partial(_ProfiledStage, self.profile))
            self._schedules[key] = self._new_schedule(stages, len(micro_batches), self._loss)
        return self._schedules[key]

    def _evaluation(self, inputs: Sequence[Tensor]) -> tuple[list[Any], Schedule]:
        """Return separate stages and a schedule; stages shared with training would exchange shapes each time."""
        key = (len(inputs), inputs[0].shape, inputs[0].dtype)
        if key not in self._evaluations:
            stages = self._new_stages(PipelineStage)
            self._evaluations[key] = stages, self._new_schedule(stages, len(inputs), self._tell_outputs)
        return self._evaluations[key]

    def _new_stages(self, kind: Callable[..., PipelineStage]) -> list[Any]:
        return [
            kind(module, number, self._stages, self._device, group=self._group)
            for number, module in self._modules.items()
        ]

    def _new_schedule(
        self, stages: list[Any], micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Schedule:
        name = self._settings.schedule
        if name in SEVERAL_STAGES:
            return _OF_SEVERAL[name](stages, micro_batches, loss, scale_grads=False)
        return _OF_ONE_STAGE[name](stages[0], micro_batches, loss, scale_grads=False)

    def _tell_outputs(self, outputs: Tensor, number: Tensor) -> Tensor:
        """Report the outputs of each micro-batch; torch calls this on the last stage in place of a loss."""
        assert self._heard_outputs is not None
        self._heard_outputs(int(number), outputs)
        return torch.zeros(())

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self._part_of is not None
        with self._precision:
            part = self._part_of(outputs, targets)
        self._parts.append(part.detach())
        return part * self._factor

    def _in_precision(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def in_precision(*given: Tensor) -> Tensor:
            with self._precision:
                return forward(*given)

        return in_precision

    def _check(self, micro_batches: Sequence[MicroBatch]) -> None:
        sizes = [len(inputs) for inputs, _ in micro_batches]
        said = no_micro_batches(self._settings, len(sizes))
        if len(set(sizes)) > 1:
            said = f"a pipeline requires equal micro-batches, got {', '.join(map(str, sizes))} samples"
        if said:
            wanted = sizes[0] if len(sizes) > 1 else 0
            fix = micro_batch_fix(self._settings, sum(sizes), wanted, int(self._factor))
            raise ToolkitError(said, where="train.micro_batch", fix=fix)

    def _sum_ties(self) -> None:
        """Sum the gradients of tied parameters on both of their ranks, with bitwise equal results."""
        received = []
        operations = []
        for tie in self.ties:
            own = _own_part(tie.parameter)
            others = torch.empty_like(own)
            received.append((own, others))
            if own.numel():
                operations.append(dist.P2POp(dist.isend, own, group=self._group, group_peer=tie.peer))
                operations.append(dist.P2POp(dist.irecv, others, group=self._group, group_peer=tie.peer))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for own, others in received:
            own.add_(others)


def _own_part(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of the gradient, in contiguous memory."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    assert own.is_contiguous(), "gradients of embeddings and heads must be contiguous"
    return own
