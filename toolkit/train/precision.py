"""Number formats and determinism of a run."""

from __future__ import annotations

import os
from typing import Literal

import torch


def autocast(device: str, precision: Literal["auto", "fp32", "bf16"]) -> torch.autocast:
    """The context of forward passes: bf16 where asked for, and by default on a GPU; parameters stay fp32."""
    kind = torch.device(device).type
    enabled = precision == "bf16" or (precision == "auto" and kind == "cuda")
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=enabled)


def use_deterministic_kernels() -> None:
    """Make a rerun on the same ranks give the same bits; torch refuses an operation that cannot.

    Call it before the first CUDA call: cuBLAS reads its workspace setting once. Filling new memory with NaN,
    which torch adds to find reads of unset values, is left off: it costs a pass over every new tensor.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
