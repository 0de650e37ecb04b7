"""Exports a checkpoint to torch's own formats: a file for `torch.load`, or a folder for `dcp.load`.

`torch.save` needs the whole export in memory; an export to a folder needs only the tensors of one file at a time.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from toolkit.checkpoint.contents.stored_tensors import StoredTensors
from toolkit.checkpoint.convert.dcp_metadata import METADATA
from toolkit.checkpoint.convert.destination import new_file, new_files
from toolkit.checkpoint.convert.nesting import joined, nested
from toolkit.checkpoint.convert.selection import ExportRequest, in_groups
from toolkit.checkpoint.convert.source_files import refuse_more_than_is_free
from toolkit.checkpoint.format.jsonvalues import restored
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.errors import ToolkitError

__all__ = ["export_dcp", "export_torch"]

_DCP_FILE_BYTES = 1_000_000_000


def export_torch(request: ExportRequest) -> None:
    """Write one file for `torch.load(weights_only=True)`.

    Raises:
        CorruptCheckpointError: a block of the checkpoint is damaged.
        ToolkitError: the destination exists, or the keys do not form a nested state.
        OwnFailureError: the disk is full, or there is not enough memory.
    """
    _check(request, sum(_sizes(request)), "torch.save", "--format safetensors or dcp")
    with new_file(request.destination, replace=request.replace) as path, _system_cause():
        request.before_reading()
        with StoredTensors(request.folder, request.manifest) as stored:
            state = _state(request, lambda key: _read(stored, key))
        # Through a Python file, because torch's own writer does not report why a write failed.
        with path.open("xb") as file:
            torch.save(state, file)


def export_dcp(request: ExportRequest, most_file_bytes: int = _DCP_FILE_BYTES) -> None:
    """Write a folder for `dcp.load(storage_reader=FileSystemReader(destination))`; errors as in `export_torch`.

    `most_file_bytes` limits the size of each file and the memory in use; a larger tensor gets a file of its own.
    """
    needed = min(sum(_sizes(request)), max(most_file_bytes, *_sizes(request), 0))
    _check(request, needed, "a DCP file", "--format safetensors")
    patterns = (METADATA, "__*.distcp")
    with new_files(request.destination, patterns, replace=request.replace, last=(METADATA,)) as part, _system_cause():
        request.before_reading()
        with StoredTensors(request.folder, request.manifest) as stored, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                _state(request, lambda key: _without_data(request.manifest, key)),
                storage_writer=_SeveralFilesWriter(part, most_file_bytes),
                planner=_ReadingPlanner({joined(one.path): one.key for one in request.selection.tensors}, stored),
                no_dist=True,
            )


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with tensors on the meta device, and reads the data of each tensor when it is written."""

    def __init__(self, keys: Mapping[str, str], stored: StoredTensors) -> None:
        """Set `keys`, which maps the name that DCP uses for a tensor to its key in the checkpoint."""
        super().__init__()
        self._keys = keys
        self._stored = stored

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._keys:
            return _read(self._stored, self._keys[index.fqn])
        return super().lookup_object(index)


class _SeveralFilesWriter(FileSystemWriter):
    """Writes several files sequentially, because DCP keeps all tensors of a file in memory until it is complete."""

    def __init__(self, path: Path, most_file_bytes: int) -> None:
        super().__init__(path)
        self._most_file_bytes = most_file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(
            in_groups(plan.items, lambda item: item.tensor_storage_size() or 0, self._most_file_bytes)
        ):
            names = dataclasses.replace(plan.storage_data, prefix=f"__{number}_")
            results += super().write_data(dataclasses.replace(plan, items=items, storage_data=names), planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _check(request: ExportRequest, needed_bytes: int, user: str, fix: str) -> None:
    """Raise an error if the keys do not form a nested state, or the export needs more memory than is free."""
    nested({one.path: None for one in (*request.selection.tensors, *request.selection.values)})
    refuse_more_than_is_free(needed_bytes, user, where=str(request.folder), fix=fix)


def _sizes(request: ExportRequest) -> list[int]:
    return [request.manifest.tensors[one.key].size_bytes for one in request.selection.tensors]


def _state(request: ExportRequest, tensor: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """Return the selected part as a nested state dict; `tensor` returns the tensor for a key."""
    entries: dict[Any, Any] = {one.path: tensor(one.key) for one in request.selection.tensors}
    values = {one.path: restored(request.manifest.objects[one.key].value, one.key) for one in request.selection.values}
    return nested(entries | values)


def _without_data(manifest: Manifest, key: str) -> torch.Tensor:
    record = manifest.tensors[key]
    return torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta")


def _read(stored: StoredTensors, key: str) -> torch.Tensor:
    """Read a tensor; it shares memory with the numpy array that was read."""
    array = stored.read(key)
    # Converted as bytes, because numpy lacks some of torch's types.
    plain = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return plain.view(getattr(torch, stored.manifest.tensors[key].dtype)).reshape(array.shape)


@contextmanager
def _system_cause() -> Iterator[None]:
    """Raise the OSError or ToolkitError that caused an error of torch, instead of that error."""
    try:
        yield
    except CheckpointException as failure:
        raise _cause_of(failure.failures[0][0]) or failure from None
    except RuntimeError as error:
        raise _cause_of(error) or error from None


def _cause_of(error: BaseException) -> OSError | ToolkitError | None:
    while not isinstance(error, (OSError, ToolkitError)):
        cause = error.__cause__ or error.__context__
        if cause is None:
            return None
        error = cause
    return error
