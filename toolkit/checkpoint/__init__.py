"""Checkpoints: HDF5 storage for torch.distributed.checkpoint, with commit, verification and retention.

The two storage classes are looked up on first use: most of this package, and every `ckpt` command, works
without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.checkpoint.storage import HDF5StorageReader, HDF5StorageWriter

__all__ = ["HDF5StorageReader", "HDF5StorageWriter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from toolkit.checkpoint import storage

    return getattr(storage, name)
