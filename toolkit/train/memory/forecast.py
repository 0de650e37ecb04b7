"""Forecast the memory of a step: run it on a twin of the model whose tensors have shapes, but no memory.

The twin is split, sharded and updated by the same code as the model; torch's FakeTensorMode computes shapes only, and
a collective does nothing. DDP and pipelines do not run without values, so the twin repeats what they keep.
"""

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed._tools.fake_collectives  # registers collectives that do nothing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from toolkit.config.resolved import ResolvedJob
from toolkit.metrics.step_profile import BACKWARD, FORWARD
from toolkit.parallel.distribute import DistributedModel, Part
from toolkit.parallel.materialise import allocate
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.outline import Outline
from toolkit.parallel.passes import Heard, MicroBatch, PartOf, PassesInTurn
from toolkit.parallel.sharded import Between, shard
from toolkit.parallel.tensor_passes import settle_gradients
from toolkit.train.loop.step import LossOf, OptimizerStep
from toolkit.train.memory.local_parts import local_of
from toolkit.train.memory.meter import Meter
from toolkit.train.memory.offload import Offload
from toolkit.train.memory.tensor_meter import TensorMeter
from toolkit.train.memory.tier import HostTier, InThreads, Slot, Transfer, file_buffer_bytes
from toolkit.train.optim.optimizers import optimizer_of
from toolkit.train.optim.precision import autocast
from toolkit.train.optim.rate_scaling import schedule_of
from toolkit.world.facts import World

__all__ = ["Forecast", "forecast"]


@dataclass
class Forecast:
    """What a step needs: the peak of each phase in bytes, and the most of each part."""

    peaks: Mapping[str, int]
    parts: Mapping[str, int]


def forecast(
    part: Part, world: World, mesh: Mesh, config: ResolvedJob, outline: Outline, loss_of: LossOf,
    micro_batch: MicroBatch,
) -> Forecast:  # fmt: skip
    """Return the memory of a later step of this rank, for the model or pipeline stage `part` on the meta device.

    Raises:
        RuntimeError: the model reads values, or an operation has no rule for shapes.
    """
    train, sizes, device = config.train, mesh.sizes, torch.device(world.device)
    twin, share = copy.deepcopy(part.module), train.batch // mesh.data_size
    for module in twin.modules():
        module._compiled_call_impl = None
    data = mesh.parameter_mesh("replicate", "shard")
    between: Between = nullcontext
    if data is not None and not mesh.are_copies:
        between = shard(twin, outline, data, config.parallel, mesh)
    meter = TensorMeter(device.type)
    with FakeTensorMode(allow_non_fake_inputs=True), meter.counting:
        allocate(twin, world.device)
        meter.model = twin
        meter.name("parameters", twin.parameters())
        meter.name("buffers", twin.buffers())
        optimizer = optimizer_of(twin, train, (outline.blocks,))
        offload, gradients, kept = None, None, []
        if train.offloaded:
            tier = _Elsewhere(world.device) if train.offload_to or device.type == "cuda" else None
            offload = Offload(train, twin, outline, world, tier or HostTier(world.device))
            optimizer, gradients = offload.optimizer(optimizer), offload.gradients
        if train.offload_to:
            kept.append(torch.empty(file_buffer_bytes(twin.parameters()), dtype=torch.uint8))
        if train.average_decay:
            kept += [torch.empty_like(local_of(one), dtype=torch.float32) for one in twin.parameters()]
        buckets = _Buckets(twin, meter, exist=mesh.are_copies and world.size > 1)
        inner: Any = PassesInTurn(twin, float(mesh.gradient_size), buckets.no_sync if buckets.own else between, meter)
        if sizes["pp"] > 1:
            inner = _Stage(part, twin, config.parallel.schedule, sizes["pp"] - mesh.place["pp"], meter)

        def run(micro_batches: Sequence[MicroBatch], part_of: PartOf, *given: Any) -> None:
            inner.run(
                micro_batches, lambda *both: _whole(part_of(*both)), *given
            )  # `distribute` enters `loss_parallel`
            if (group := mesh.group("tp")) is not None:
                settle_gradients(twin, group)

        model = DistributedModel(twin, mesh, cast(Any, SimpleNamespace(run=run)), 0, (), meter)
        schedule = schedule_of(train.model_copy(update={"lr_scaling": "none"}))
        step = OptimizerStep(
            model, optimizer, schedule, loss_of, autocast(world.device, train.precision), train.batch, train.clip_norm,
            gradients=gradients,
        )  # fmt: skip
        number = max(1, share // (train.micro_batch or share))
        text, targets = (torch.empty_like(tensor, device=device) for tensor in micro_batch)
        micro_batches = [(text, targets)] * (number if sizes["pp"] > 1 else min(number, 3))
        step.take(micro_batches)
        if offload is not None:
            offload.begin(optimizer)
        state = [value for of_one in optimizer.state.values() for value in of_one.values() if isinstance(value, Tensor)]
        meter.name("optimizer state", state)
        meter.begin()
        step.take(micro_batches)
    return Forecast(meter.peaks, {**meter.most, "gradients": meter.gradients, "activations": meter.activations})


class _Buckets:
    """Keeps gradients as DDP does: a bucket beside each, which receives it in the last backward pass of a step."""

    def __init__(self, twin: nn.Module, meter: TensorMeter, *, exist: bool) -> None:
        parameters = [one for one in twin.parameters() if one.requires_grad]
        self.own = {one: torch.empty_like(one) for one in parameters} if exist else {}
        self._meter, self._is_last = meter, True
        meter.name("communication", self.own.values())
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._received)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_last = False
        yield
        self._is_last = True

    def _received(self, parameter: Any) -> None:
        if self.own and self._is_last:
            parameter.grad = self.own[parameter]
        elif parameter.grad is not None:
            self._meter.name("gradients", [parameter.grad])


def _whole(part: Tensor) -> Tensor:
    return part.full_tensor() if isinstance(part, DTensor) else part


class _Stage:
    """Runs the passes of one stage in the order of torch's schedule, with its buffers for messages."""

    def __init__(self, part: Part, twin: nn.Module, schedule: str, following: int, meter: Meter) -> None:
        if schedule not in ("1f1b", "gpipe"):
            raise RuntimeError(f'the schedule "{schedule}" is not forecast')
        self._part, self._twin, self._meter = part, twin, meter
        self._messages: list[Tensor] = []
        self._ahead = following if schedule == "1f1b" else None

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        under_way: deque[Tensor] = deque()
        for number, (text, targets) in enumerate(micro_batches):
            with self._meter.phase(FORWARD), precision:
                output = self._twin(self._input(number, text))
                if self._part.is_last:
                    output = part_of(output, targets)
                    heard(output.detach())
            under_way.append(output)
            if len(under_way) == self._ahead:
                self._backward(under_way.popleft())
        while under_way:
            self._backward(under_way.popleft())

    def _input(self, number: int, text: Tensor) -> Tensor:
        stream = self._part.inputs()
        if not stream.is_floating_point():
            return text
        if number == len(self._messages):
            self._messages.append(torch.empty_like(stream, device=text.device, requires_grad=True))
        return self._messages[number]

    def _backward(self, output: Tensor) -> None:
        with self._meter.phase(BACKWARD):
            output.backward(None if self._part.is_last else torch.empty_like(output))


class _Elsewhere(HostTier):
    """A tier that needs no memory of the device, except for the tensors under way into it."""

    def slot(self, like: Tensor) -> Slot:
        return Slot(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta"))

    def _copy(self, slot: Slot, tensor: Tensor, *, is_write: bool) -> Transfer:
        if slot.last is not None:
            slot.last.wait()
        slot.last = InThreads((), self.traffic, Path(), tensor)
        return slot.last
