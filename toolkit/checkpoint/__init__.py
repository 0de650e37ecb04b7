"""Checkpoints: HDF5 storage for torch.distributed.checkpoint, with commit, verification and retention.

The two storage classes are imported on first use: most of this package, and every `ckpt` command, works
without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.checkpoint.storage_reader import HDF5StorageReader
    from toolkit.checkpoint.storage_writer import HDF5StorageWriter

__all__ = ["HDF5StorageReader", "HDF5StorageWriter"]
_MODULES = {
    "HDF5StorageReader": "toolkit.checkpoint.storage_reader",
    "HDF5StorageWriter": "toolkit.checkpoint.storage_writer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
