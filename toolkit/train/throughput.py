"""How fast a run trains: floating point operations of a step, counted, and their share of what the GPU could do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from toolkit.train.memory.meta_errors import on_shapes_alone
from toolkit.train.memory.recompute import forget_recompute
from toolkit.train.peak_flops import peak_flops


@dataclass(frozen=True)
class StepFlops:
    """Of one micro-batch: matrix products, convolutions and attention; a multiply and an add are two."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class Throughput:
    """`flops_per_s` are model FLOPs of one rank; `utilization` (MFU) is None where the device's peak is not known."""

    tokens_per_s: float
    flops_per_s: float
    utilization: float | None


def count_flops(
    model: nn.Module, micro_batch: tuple[Tensor, Tensor], loss_of: Callable[[Any, Any], Tensor]
) -> StepFlops:
    """The model FLOPs of a forward and a backward pass, counted by torch on shapes alone: nothing is computed.

    Recomputed activations are not counted, as model FLOPs are the work of the model itself, and causal attention
    is counted whole (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B). Elementwise work is not counted. Give the
    model before it is sharded or wrapped.

    Raises:
        ToolkitError: the model does something that shapes alone do not decide.
    """
    shapes = on_meta(model)
    forget_recompute(shapes)
    counter = FlopCounterMode(display=False)
    inputs, targets = (one.to("meta") for one in micro_batch)
    fix = "make tensors on the device of the input, and let no branch depend on a value"
    with on_shapes_alone(model, "cannot be run on shapes alone", where="count_flops", fix=fix), counter:
        loss = loss_of(shapes(inputs), targets)
        forward = counter.get_total_flops()
        loss.backward()
    return StepFlops(forward, counter.get_total_flops() - forward)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers have shapes and no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def throughput(
    *, flops_per_step: float, tokens_per_step: float, seconds: float, ranks: int, device_name: str, dtype: torch.dtype
) -> Throughput:
    """What a step of `seconds` came to.

    Args:
        flops_per_step, tokens_per_step: of all ranks together.
        device_name: as `torch.cuda.get_device_name()` has it; "" for a CPU, whose peak is unknown.
        dtype: of the matrix products.
    """
    per_rank = flops_per_step / ranks / seconds
    peak = peak_flops(device_name, dtype)
    return Throughput(tokens_per_step / seconds, per_rank, None if peak is None else per_rank / peak)


def no_peak(device_name: str, dtype: torch.dtype) -> str:
    """Why records will have no MFU, where there is a GPU; "" where they will, and on CPUs."""
    if not device_name or peak_flops(device_name, dtype) is not None:
        return ""
    of_type = str(dtype).removeprefix("torch.")
    return f"no mfu is written: what {device_name} can do at most in {of_type} is not known"
