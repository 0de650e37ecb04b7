"""Random numbers of tensor parallel ranks: the same where they hold the same, different where they hold pieces.

The ranks' generators are always alike. Where a rank works on its own heads, or its piece of the sequence, it draws from a
generator that is derived from the common one and its place, and then continues with the common one. So there is nothing more
to save than that, and a block that is run again from the same state draws the same.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn


class PieceDraws:
    """Hooks that begin and end the work on pieces.

    Args:
        device_type: of the rank's tensors.
        place: of the rank, among those that hold pieces of the same.
    """

    def __init__(self, device_type: str, place: int) -> None:
        self._device_type = device_type
        self._place = place
        self._common: Tensor | None = None  # where the common generator stands, while the rank's own is in its place

    @property
    def on_pieces(self) -> bool:
        return self._common is not None

    def begin(self, module: nn.Module, *_: Any) -> None:
        """A block begins with the common generator, whatever became of the one before.

        A block that is run again, for its backward pass, may end in the middle; torch then puts generators back.
        """
        self._common = None

    def enter(self, module: nn.Module, *_: Any) -> None:
        if self._common is not None or not module.training:
            return
        generator = self._generator()
        torch.rand(1, device=generator.device, generator=generator)  # another state each time
        self._common = generator.get_state()
        words = hashlib.sha256(self._common.numpy().tobytes() + self._place.to_bytes(8, "little")).digest()
        generator.manual_seed(int.from_bytes(words[:8], "little") >> 1)

    def leave(self, module: nn.Module, *_: Any) -> None:
        if self._common is not None:
            self._generator().set_state(self._common)
            self._common = None

    def _generator(self) -> torch.Generator:
        if self._device_type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device()]
        return torch.default_generator
