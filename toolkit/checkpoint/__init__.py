"""HDF5 storage for torch.distributed.checkpoint (DCP). Imports lazily, because some `ckpt` commands need no torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.checkpoint.checkpointer import Checkpointer
    from toolkit.checkpoint.folder.retention import Retention
    from toolkit.checkpoint.loading.planner import LoadPlanner
    from toolkit.checkpoint.saving.plan import SavePlanner
    from toolkit.checkpoint.storage_reader import HDF5StorageReader
    from toolkit.checkpoint.storage_writer import HDF5StorageWriter

__all__ = ["Checkpointer", "HDF5StorageReader", "HDF5StorageWriter", "LoadPlanner", "Retention", "SavePlanner"]
_MODULES = {
    "Checkpointer": "toolkit.checkpoint.checkpointer",
    "HDF5StorageReader": "toolkit.checkpoint.storage_reader",
    "HDF5StorageWriter": "toolkit.checkpoint.storage_writer",
    "LoadPlanner": "toolkit.checkpoint.loading.planner",
    "Retention": "toolkit.checkpoint.folder.retention",
    "SavePlanner": "toolkit.checkpoint.saving.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
