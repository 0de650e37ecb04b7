"""Compare the cost of planning a repeated save on very many ranks: toolkit ("ours") against DCP with a cached plan.

One process plays the part of each rank, with real DTensors on a mesh of N ranks (torch's "fake" process group) and the
functions that a save calls. Included are each rank's check of its own state, the data that it packs for rank 0, and all
work of rank 0 from receiving these data until the checkpoint is committed: writing and syncing metadata, and finding
checkpoints to remove (DCP removes none). The tensor data and the network are not included. Over the network, ours sends
49 bytes per rank, and DCP a pickle in each direction, whose size is reported.
"""

from __future__ import annotations

import gc
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_speed_ways import CachingPlanner, State, remove
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from toolkit.checkpoint.folder.commit import open_part
from toolkit.checkpoint.folder.retention import Retention, retain
from toolkit.checkpoint.format.layout import digest_name, shard_name
from toolkit.checkpoint.format.manifest import Piece, TensorRecord
from toolkit.checkpoint.saving.finish import _WRITTEN, Description, WholePlan, finish_save
from toolkit.checkpoint.saving.plan import SavePlanning

TENSORS = 1000
COLUMNS = 2
KEY = "planning"
SHARD_BYTES, DIGEST_BYTES = 4 * 1024 * 1024, 200
ZERO, EVERY = "rank 0", "every rank"


class Clock:
    """Collects the seconds of all rounds by name."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.took[name].append(time.perf_counter() - start)
        return result


def planning(ranks: int, folder: Path, rounds: int) -> dict[str, Any]:
    """Return medians in seconds, for rank 0 and for each other rank, of ours and of DCP."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    state = {
        f"layers.{number}": DTensor.from_local(torch.zeros(1, COLUMNS), mesh, [Shard(0)]) for number in range(TENSORS)
    }
    clock = Clock()
    gc.disable()
    _ours(clock, state, ranks, folder, rounds)
    gc.collect()
    traffic = _of_dcp(clock, state, ranks, folder, rounds)
    gc.enable()
    dist.destroy_process_group()
    medians = {name: statistics.median(times) for name, times in clock.took.items()}
    totals = {f"{who}, {rank}": _total(medians, who, rank) for who in ("ours", "DCP") for rank in (ZERO, EVERY)}
    ratio = {f"ours / DCP, {rank}": totals[f"ours, {rank}"] / totals[f"DCP, {rank}"] for rank in (ZERO, EVERY)}
    return {"ranks": ranks, "tensors": TENSORS, "median_s": medians, "total_s": totals, "ratio": ratio, **traffic}


def _total(medians: dict[str, float], who: str, rank: str) -> float:
    """Return the total time of a rank. Rank 0 also does the work of every other rank."""
    parts = (EVERY, ZERO) if rank == ZERO else (EVERY,)
    return sum(
        seconds for name, seconds in medians.items() if name.startswith(tuple(f"{who}, {one}:" for one in parts))
    )


def _ours(clock: Clock, state: State, ranks: int, folder: Path, rounds: int) -> None:
    """Time ours: each rank compares the shape of its state; rank 0 receives digests, checks files, and commits."""
    plan: Any = SavePlanning(SimpleNamespace(rank=0))  # type: ignore[arg-type]
    plan._shape = plan.flatten(state).shape  # as after the first save
    shards = [shard_name(rank, ranks) for rank in range(ranks)]
    tensors = {
        name: TensorRecord(
            dtype="float32",
            shape=(ranks, COLUMNS),
            path=(name,),
            pieces=tuple(Piece(shard, (rank, 0), (1, COLUMNS), 4096) for rank, shard in enumerate(shards)),
        )
        for name in state
    }
    whole = WholePlan.of(tensors, {name: (name,) for name in state}, shards)
    record = _WRITTEN.pack(SHARD_BYTES, bytes(16), DIGEST_BYTES, bytes(16))
    for number in range(rounds):
        description = Description(folder / f"step-{number:08}", "benchmark", number)
        part = open_part(description.final, 0, description.token)
        for shard in shards:  # sparse files of the size that the manifest states
            for name, size in ((shard, SHARD_BYTES), (digest_name(shard), DIGEST_BYTES)):
                with (part / name).open("wb") as file:
                    file.truncate(size)
        looked = clock.time(f"ours, {EVERY}: compare the state", lambda: plan.is_new(plan.flatten(state)))
        assert looked is False
        work = lambda: finish_save(description, whole, dict.fromkeys(shards, record), {})  # noqa: B023, E731
        clock.time(f"ours, {ZERO}: check the files, manifest, commit", work)
        clock.time(f"ours, {ZERO}: retention", lambda: retain(folder, Retention(1), 0))
        remove(description.final)


def _of_dcp(clock: Clock, state: State, ranks: int, folder: Path, rounds: int) -> dict[str, int]:
    """Time the steps of `dcp.save` with a cached plan; return the number of bytes sent over the network."""
    _keep_plan(state, ranks)
    unchanged = SavePlan([], usable=False)
    results = _results(state, 0)
    pickled = [pickle.dumps(_results(state, rank)) for rank in range(ranks)]
    metadata_bytes = 0
    for number in range(rounds):
        planner = CachingPlanner(KEY)
        writer = dcp.FileSystemWriter(folder / f"dcp-{number}")
        writer.path.mkdir()

        def look() -> None:
            planner.set_up_planner(state, is_coordinator=False)  # noqa: B023
            planner.create_local_plan()  # noqa: B023

        clock.time(f"DCP, {EVERY}: plan, compare", look)
        assert planner.was_cached
        clock.time(f"DCP, {EVERY}: pickle its results", lambda: pickle.dumps(results))

        def global_plan() -> Metadata:
            plans, metadata = planner.create_global_plan([unchanged] * ranks)  # noqa: B023
            writer.prepare_global_plan(plans)  # noqa: B023
            return metadata

        metadata = clock.time(f"DCP, {ZERO}: global plan", global_plan)
        found = clock.time(f"DCP, {ZERO}: unpickle all results", lambda: [pickle.loads(text) for text in pickled])
        clock.time(f"DCP, {ZERO}: metadata", lambda: writer.finish(metadata, found))  # noqa: B023
        sent = clock.time(f"DCP, {ZERO}: pickle the metadata for all", lambda: pickle.dumps(metadata))  # noqa: B023
        clock.time(f"DCP, {EVERY}: unpickle the metadata", lambda: pickle.loads(sent))  # noqa: B023
        metadata_bytes = len(sent)
        remove(Path(writer.path))
        found.clear()
    return {"dcp_bytes_from_a_rank": len(pickled[0]), "dcp_bytes_to_a_rank": metadata_bytes}


def _keep_plan(state: State, ranks: int) -> None:
    """Fill the cache of DCP's planner as after the first save on rank 0."""
    planner = CachingPlanner(KEY)
    planner.set_up_planner(state, is_coordinator=True)
    planner.finish_plan(planner.create_local_plan())
    tensor_metadata = {
        name: TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size([ranks, COLUMNS]),
            [ChunkStorageMetadata(torch.Size([rank, 0]), torch.Size([1, COLUMNS])) for rank in range(ranks)],
        )
        for name in state
    }
    SavePlanner._cached_all_plans[KEY] = SavePlanner._cached_global_plan[KEY] = [planner.plan] * ranks
    SavePlanner._cached_metadata[KEY] = Metadata(tensor_metadata, planner_data={name: (name,) for name in state})


def _results(state: State, rank: int) -> list[WriteResult]:
    """Return what `FileSystemWriter.write_data` returns on a rank."""
    file = f"__{rank}_0.distcp"
    return [
        WriteResult(MetadataIndex(name, torch.Size([rank, 0]), rank), 1200, _StorageInfo(file, number * 1200, 1200))
        for number, name in enumerate(state)
    ]
