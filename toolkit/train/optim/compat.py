"""The few private names of torch that training needs."""

from __future__ import annotations

import torch
from torch import Tensor


def found_inf_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Tensor:
    """The scalar in which `scaler.unscale_(optimizer)` notes an overflow: above 0 where there was one.

    Who changes it changes what `scaler.step` does. A rank without gradients gets one, of 0, as `step` wants one.
    There is one device, as a rank has one.
    """
    found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if not found:
        scale = scaler._scale
        assert scale is not None, "the loss was not scaled"
        found[scale.device] = torch.zeros((), dtype=torch.float32, device=scale.device)
    assert len(found) == 1, f"gradients on several devices: {list(found)}"
    return next(iter(found.values()))
