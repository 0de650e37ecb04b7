"""A checkpoint as torch's own files: one that `torch.load` reads, or a folder that `dcp.load` reads.

Both hold the nested state dict that was saved, tensors and values. Torch writes them from memory: all that is exported
is in memory at once.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from toolkit.checkpoint.contents.stored_tensors import StoredTensors
from toolkit.checkpoint.convert.destination import new_file, new_files
from toolkit.checkpoint.convert.nesting import nested
from toolkit.checkpoint.convert.selection import Selection
from toolkit.checkpoint.format.manifest import Manifest

_DCP_METADATA = ".metadata"


def export_torch(
    folder: Path, manifest: Manifest, selection: Selection, destination: Path, *, replace: bool = False
) -> None:
    """Write one file for `torch.load(weights_only=True)`.

    Raises:
        CorruptCheckpointError: a block of the checkpoint is damaged.
        ToolkitError: the destination is taken, or the keys make no nested state.
        OwnFailureError: the disk is full.
    """
    with new_file(destination, replace=replace) as path:
        state = _state(folder, manifest, selection)
        try:
            # Through a file of Python's: torch's own says nothing about why it could not write.
            with path.open("xb") as file:
                torch.save(state, file)
        except RuntimeError as error:
            raise _of_the_system(error) or error from None


def export_dcp(
    folder: Path, manifest: Manifest, selection: Selection, destination: Path, *, replace: bool = False
) -> None:
    """Write a folder for `dcp.load(storage_reader=FileSystemReader(destination))`.

    Raises:
        CorruptCheckpointError: a block of the checkpoint is damaged.
        ToolkitError: the destination is taken, or the keys make no nested state.
        OwnFailureError: the disk is full.
    """
    patterns = (_DCP_METADATA, "__*.distcp")
    with new_files(destination, patterns, replace=replace, last=lambda name: name == _DCP_METADATA) as part:
        state = _state(folder, manifest, selection)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(state, storage_writer=FileSystemWriter(part), no_dist=True)
        except CheckpointException as failure:
            raise _of_the_system(failure.failures[0][0]) or failure from None


def _state(folder: Path, manifest: Manifest, selection: Selection) -> dict[str, Any]:
    """What was selected as the nested state that was saved."""
    # The paths first: what makes no state must not cost the reading of it.
    nested({one.path: None for one in (*selection.tensors, *selection.values)})
    with StoredTensors(folder, manifest) as stored:
        entries: dict[Any, Any] = {
            one.path: _as_tensor(stored.read(one.key), manifest.tensors[one.key].dtype) for one in selection.tensors
        }
    entries |= {one.path: manifest.objects[one.key].value for one in selection.values}
    return nested(entries)


def _as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """The same bits as torch's type; the memory is shared."""
    # Through bytes: torch has types that numpy has not.
    plain = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return plain.view(getattr(torch, dtype)).reshape(array.shape)


def _of_the_system(error: BaseException) -> OSError | None:
    """The system's error behind one of torch's, which does not tell the cause."""
    while not isinstance(error, OSError):
        behind = error.__cause__ or error.__context__
        if behind is None:
            return None
        error = behind
    return error
