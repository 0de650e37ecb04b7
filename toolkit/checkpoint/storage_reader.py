"""HDF5 storage reader for DCP (torch): `dcp.load(state, storage_reader=HDF5StorageReader(path))`."""

import os
from dataclasses import replace
from math import prod
from operator import add
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from toolkit.checkpoint.boxes import chunk_of
from toolkit.checkpoint.format.layout import MANIFEST, folder_of_rank
from toolkit.checkpoint.format.manifest import Manifest
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.checkpoint.loading.planned import metadata_of, piece_of, planned_by
from toolkit.checkpoint.loading.shared_checks import Touched, node_name, shares_of_checks, touched_blocks
from toolkit.checkpoint.tensors import rank_here
from toolkit.errors import ToolkitError


class HDF5StorageReader(StorageReader):
    """Reads the checkpoint folder `path` with `threads` threads, on any number of ranks.

    On each node, one of the ranks that read a block checks its digest. After an error, which DCP raises on all ranks,
    the contents of the tensors are undefined.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 1) -> None:
        self._path = self._folder = Path(path)
        self._threads = threads
        self._manifest: Manifest | None = None

    @property
    def checkpoint_id(self) -> str:
        """The folder as a string, which DCP logs."""
        return str(self._path)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint, read on first use: that of this rank if a job saved without collectives."""
        if self._manifest is None:
            self._folder = _folder_for(self._path)
            self._manifest = read_manifest(self._folder)
        return self._manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another folder, if one is given."""
        if checkpoint_id:
            self._path = Path(checkpoint_id)
            self._manifest = None

    def read_metadata(self) -> dcp.Metadata:
        """Return the manifest converted to DCP metadata."""
        # If the signature had **kwargs, DCP would retry after an error, and raise another one without a fix.
        return metadata_of(self.manifest)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the manifest contains everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the name of this rank's node and the blocks that this rank reads to the plan."""
        touched = touched_blocks(self.manifest, plan.items)
        readers = node_name() if self._folder == self._path else str(self._folder)  # no other rank reads these files
        return replace(plan, storage_data=Touched(readers, touched))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Distribute the block checks among the ranks of each node."""
        shares = shares_of_checks([plan.storage_data for plan in plans])
        return [replace(plan, storage_data=others) for plan, others in zip(plans, shares, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's parts of the tensors, one shard file at a time."""
        _refuse_misplaced(plan, planner, self.manifest)
        planned = planned_by(self._folder, self.manifest, plan, planner)
        planned.read(threads=self._threads, checked_by_others=plan.storage_data)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the folder contains a checkpoint of this format."""
        return (_folder_for(Path(checkpoint_id)) / MANIFEST).is_file()


def _folder_for(path: Path) -> Path:
    own = folder_of_rank(path, rank_here())
    return own if not (path / MANIFEST).exists() and (own / MANIFEST).is_file() else path


def _refuse_misplaced(plan: LoadPlan, planner: LoadPlanner, manifest: Manifest) -> None:
    """Raise a ToolkitError if torch's planner gave uneven parts wrong offsets (see `boxes`): rows would be wrong."""
    state: dict[str, Any] = getattr(planner, "state_dict", {})
    parts = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor) and name in manifest.tensors}
    unread = {name: tensor.to_local().numel() for name, tensor in parts.items()}
    for item in plan.items:
        name = item.dest_index.fqn
        if name not in parts:
            continue
        piece = piece_of(manifest.tensors[item.storage_index.fqn], item.storage_index)
        wanted = map(add, chunk_of(parts[name], name).offsets, item.dest_offsets)
        if list(wanted) != list(map(add, piece.offset, item.storage_offsets)):
            raise _misplaced(name)
        unread[name] -= prod(item.lengths)
    for name in unread:
        if unread[name]:
            raise _misplaced(name)


def _misplaced(name: str) -> ToolkitError:
    return ToolkitError(
        "torch's planner computed a wrong offset for this rank's part",
        where=name,
        fix="load with `Checkpointer`, or pass `planner=toolkit.checkpoint.LoadPlanner(())` to dcp.load",
    )
