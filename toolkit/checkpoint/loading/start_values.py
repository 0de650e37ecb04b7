"""Keeps the values of tensors before a load, in case a damaged checkpoint overwrites them and an older one lacks them.

Large tensors are not copied, because a second optimizer state would not fit into memory. If such a copy would be needed,
the attempt exits, and the next one starts without the damaged checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.format.manifest import Manifest
from toolkit.checkpoint.loading.planner import is_optional, put_value
from toolkit.checkpoint.tensors import refuse_nested, refuse_no_dict
from toolkit.errors import OwnFailureError

MOST_BYTES_EACH = 1 << 20
MOST_BYTES = 64 << 20  # of all copies together
_NAMES_SHOWN = 3


class StartValues:
    """Copies of small tensors, and the names of all tensors that a damaged checkpoint may have overwritten.

    Args:
        tensors: the target of the load.
        optional: keys that a checkpoint may lack; their tensors are copied first.
    """

    def __init__(self, tensors: dict[str, Any], optional: tuple[str, ...]) -> None:
        refuse_no_dict(tensors, "tensors")
        self._tensors, self._optional = tensors, optional
        flat, self._paths = flatten_state_dict(tensors)
        refuse_nested(flat)
        self._values = {name: value for name, value in flat.items() if not isinstance(value, torch.Tensor)}
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._overwritten: set[str] = set()
        self._damaged: list[str] = []
        free = MOST_BYTES
        for name in sorted(flat.keys() - self._values.keys(), key=lambda name: not is_optional(name, optional)):
            local = _on_this_rank(flat[name])
            if local.layout == torch.strided and local.nbytes <= min(free, MOST_BYTES_EACH):
                free -= local.nbytes
                self._copies.append((name, local, local.clone()))
        self._large = flat.keys() - self._values.keys() - {name for name, _, _ in self._copies}

    def may_be_overwritten_by(self, folder: Path, manifest: Manifest) -> None:
        """Record that a load of a checkpoint failed halfway."""
        self._damaged.append(folder.name)
        self._overwritten |= (self._large | self._values.keys()) & (manifest.tensors.keys() | manifest.objects.keys())

    def restore(self, following: Manifest | None, *, fix: str) -> None:
        """Restore values that may have been overwritten, before the next load.

        Args:
            following: the checkpoint that is loaded next, or None.
            fix: the fix of the error.

        Raises:
            OwnFailureError: a tensor that `following` lacks was not copied.
        """
        if not self._damaged:
            return
        for _, tensor, copy in self._copies:
            tensor.copy_(copy)
        for name in self._overwritten & self._values.keys():
            put_value(self._tensors, self._paths[name], self._values[name])
        lost = sorted(name for name in self._overwritten & self._large if self._stays(name, following))
        if lost:
            named = ", ".join(lost[:_NAMES_SHOWN])
            more = f" and {len(lost) - _NAMES_SHOWN} more" if len(lost) > _NAMES_SHOWN else ""
            after = f"step {following.step} does not contain" if following is not None else "no other contains"
            raise OwnFailureError(
                f"{named}{more} may be partly overwritten by the damaged checkpoint {' and '.join(self._damaged)}, and "
                f"{after} the original value",
                fix=fix,
            )

    def _stays(self, name: str, following: Manifest | None) -> bool:
        """Whether the next load leaves a tensor unchanged. It reports a required tensor that it lacks itself."""
        if following is None:
            return True
        return name not in following.tensors and is_optional(name, self._optional)


def _on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
