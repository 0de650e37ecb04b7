"""Names of torch that this package needs and that are private, or differ between the versions that we run on."""

from __future__ import annotations

from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_composable

__all__ = ["replicate_composable"]
