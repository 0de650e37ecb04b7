"""Floating-point precision and determinism of a run."""

import os
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor


def found_inf_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the scalar in which `scaler.unscale_(optimizer)` records an overflow as a value above 0.

    `scaler.step` reads it, so changing it changes whether the step is skipped. A rank without gradients gets a 0, which
    `step` requires. All gradients of a rank are on one device.
    """
    found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if not found:
        scale = scaler._scale
        assert scale is not None, "the loss was not scaled"
        found[scale.device] = torch.zeros((), dtype=torch.float32, device=scale.device)
    assert len(found) == 1, f"gradients on several devices: {list(found)}"
    return next(iter(found.values()))


Precision = Literal["auto", "fp32", "bf16", "fp16"]

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def computed_in(device: str, precision: Precision) -> torch.dtype:
    """Return the dtype of forward passes: `auto` is bf16 on a GPU, else fp32."""
    if precision == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return _TYPES[precision]


def autocast(device: str, precision: Precision) -> torch.autocast:
    """Return the autocast context of forward passes in bf16 or fp16; parameters stay fp32.

    fp16 also needs `gradient_scaler`.
    """
    dtype = computed_in(device, precision)
    if dtype == torch.float32:
        return torch.autocast(torch.device(device).type, enabled=False)
    return torch.autocast(torch.device(device).type, dtype=dtype)


def gradient_scaler(device: str, precision: Precision, first_scale: float = 65536.0) -> torch.amp.GradScaler:
    """Return torch's scaler for dynamic loss scaling; disabled except in fp16.

    fp16 underflows below 6e-8, so the loss is scaled up until a gradient overflows. That step is skipped, and the scale
    halved (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2). Call after a backward pass:
    `scaler.unscale_(optimizer)`, `agree_found_inf`, clipping, `scaler.step(optimizer)`, `scaler.update()`. A rank
    without a loss, such as the first stage of a pipeline, must first scale an arbitrary scalar, because the scaler
    creates its scale then and all ranks need it.
    """
    enabled = computed_in(device, precision) == torch.float16
    return torch.amp.GradScaler(torch.device(device).type, init_scale=first_scale, enabled=enabled)


def agree_found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Make all ranks skip a step if a gradient overflowed on any of them; collective.

    Call it between `scaler.unscale_(optimizer)` and `scaler.step(optimizer)`. Each rank checks only its own gradients.
    DDP gradients are equal on all ranks. For DTensor gradients (FSDP2, tensor parallel), torch itself agrees, but only
    over the mesh of the first one. Pipeline stages, experts and parameters on several meshes need this call.
    """
    if scaler.is_enabled() and dist.is_initialized():
        dist.all_reduce(found_inf_of(scaler, optimizer), op=dist.ReduceOp.MAX)


def use_deterministic_kernels() -> None:
    """Make reruns with the same ranks bitwise identical; torch rejects operations that are not deterministic.

    Call it before the first CUDA call, because cuBLAS reads its workspace setting only once. Filling uninitialized
    memory with NaN stays off, because it writes every new tensor once more.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
