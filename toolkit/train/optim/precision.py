"""Number formats and determinism of a run."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed as dist

from toolkit.train.optim.compat import found_inf_of

Precision = Literal["auto", "fp32", "bf16", "fp16"]

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def computed_in(device: str, precision: Precision) -> torch.dtype:
    """The type of forward passes: `auto` is bf16 on a GPU, else fp32."""
    if precision == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return _TYPES[precision]


def autocast(device: str, precision: Precision) -> torch.autocast:
    """The context of forward passes in the 16 bits that are asked for; parameters stay fp32.

    In fp16 gradients need `gradient_scaler`, too.
    """
    dtype = computed_in(device, precision)
    if dtype == torch.float32:
        return torch.autocast(torch.device(device).type, enabled=False)
    return torch.autocast(torch.device(device).type, dtype=dtype)


def gradient_scaler(device: str, precision: Precision, first_scale: float = 65536.0) -> torch.amp.GradScaler:
    """Dynamic loss scaling: torch's scaler, which is on in fp16 and otherwise lets all through.

    fp16 loses gradients below 6e-8, so the loss is scaled up until one overflows: that step is skipped, and the scale
    halved (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2). After a backward pass:
    `scaler.unscale_(optimizer)`, `agree_found_inf`, clipping, `scaler.step(optimizer)`, `scaler.update()`. A rank that sees
    no loss, as the first stage of a pipeline, scales any scalar before, as all ranks need the scale.
    """
    enabled = computed_in(device, precision) == torch.float16
    return torch.amp.GradScaler(torch.device(device).type, init_scale=first_scale, enabled=enabled)


def agree_found_inf(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> None:
    """Make all ranks of the group skip a step if the gradients of one have overflowed; collective.

    Call it between `scaler.unscale_(optimizer)` and `scaler.step(optimizer)`. Each rank looks only at the gradients that
    it holds. DDP's are the same everywhere. torch agrees on DTensor gradients (FSDP2, tensor parallel) by itself, but
    over the mesh of the first one alone: stages of a pipeline, experts on ranks of their own and parameters on
    several meshes need this, over all ranks of one copy of the model, or all ranks.
    """
    if scaler.is_enabled() and dist.is_initialized():
        dist.all_reduce(found_inf_of(scaler, optimizer), op=dist.ReduceOp.MAX, group=group)


def use_deterministic_kernels() -> None:
    """Make a rerun on the same ranks give the same bits; torch refuses an operation that cannot.

    Call it before the first CUDA call: cuBLAS reads its workspace setting once. Filling new memory with NaN,
    which torch adds to find reads of unset values, is left off: it costs a pass over every new tensor.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
