"""The methods to save and load that `checkpoint_speed.py` compares. All of them sync their files to disk (fsync)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.tensor import DTensor

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.checkpointer import Checkpointer
from toolkit.checkpoint.format.digests import BLOCK_BYTES
from toolkit.checkpoint.loading import shard_reader
from toolkit.checkpoint.saving import shard_writer
from toolkit.world.facts import World

State = dict[str, DTensor]
Load = Callable[[Path], dict[str, Tensor] | None]  # fills the target, or returns this rank's tensors


@dataclass(frozen=True)
class Place:
    """What a rank saves, the target that it loads into, and the folder, with `threads` threads for reads and writes."""

    world: World
    folder: Path
    saved: State
    target: State
    threads: int
    shape: str

    @property
    def local(self) -> dict[str, Tensor]:
        """The shards that this rank saves."""
        return {name: tensor.to_local() for name, tensor in self.saved.items()}


@dataclass(frozen=True)
class Way:
    """A method to save, with methods to load the result. Results report the fastest method of each `group`.

    save: receives a number that increases by one each time, and returns the path that it has written.
    stays: the files remain until the next save, which overwrites them, or this method removes them itself.
    """

    name: str
    group: str
    save: Callable[[int], Path]
    stays: bool = False
    loads: dict[str, Load] = field(default_factory=dict)


class CachingPlanner(DefaultSavePlanner):
    """DCP's planner with plan caching, which also records whether the last save used the cached plan."""

    def __init__(self, shape: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = shape
        self.was_cached = False

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.was_cached = not plan.usable
        return plan


def ways(place: Place) -> list[Way]:
    """Return all methods. Collective."""
    return [*_ours(place), *_of_dcp(place), *_of_files(place)]


# ---- toolkit


def _ours(place: Place) -> Iterator[Way]:
    yield _checkpointer(place, "ours", {"ours by dcp.load": _our_reader(place)})
    yield _checkpointer(place, "ours, always new files", keep_last=10**9)
    yield _checkpointer(place, "ours, no digests", around=no_digests)

    def save(number: int) -> Path:
        path = place.folder / f"ours-dcp-{number}"
        dcp.save(place.saved, storage_writer=HDF5StorageWriter(path, threads=place.threads))
        return path

    yield Way("ours by dcp.save", "ours by dcp.save", save)


def _checkpointer(
    place: Place,
    name: str,
    loads: dict[str, Load] | None = None,
    *,
    keep_last: int = 1,
    around: Callable[[], Any] = nullcontext,
) -> Way:
    """With `keep_last` 1, each save overwrites the files of the save before the last one, as in a run."""
    folder = place.folder / name.replace(" ", "-")
    saver = Checkpointer(folder, place.world, keep_last=keep_last)
    loader = Checkpointer(folder, place.world)  # separate, since a checkpointer does not recycle what it has loaded

    def save(number: int) -> Path:
        with around():
            return saver.save(number, place.saved, {})

    def load(_: Path) -> None:
        with around():
            assert loader.load(place.target) is not None

    keeps = keep_last == 1
    return Way(name, name, save, stays=keeps, loads={name: load, **(loads or {})} if keeps else {})


def _our_reader(place: Place) -> Load:
    def load(path: Path) -> None:
        dcp.load(place.target, storage_reader=HDF5StorageReader(path, threads=place.threads))

    return load


class _SameAsAny(str):
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class _NoDigest:
    def update(self, _: memoryview) -> None:
        pass

    def hexdigest(self) -> str:
        return _SameAsAny("0" * 32)


@contextmanager
def no_digests() -> Iterator[None]:
    """Disable the digests of blocks and their verification in this process, to time everything else."""
    modules: tuple[Any, ...] = (shard_writer, shard_reader)
    for module in modules:
        module.xxhash = SimpleNamespace(xxh3_128=_NoDigest)
    try:
        yield
    finally:
        for module in modules:
            module.xxhash = xxhash


# ---- DCP


def _of_dcp(place: Place) -> Iterator[Way]:
    def load(path: Path) -> None:
        dcp.load(place.target, storage_reader=dcp.FileSystemReader(path))

    def save(number: int) -> Path:
        path = place.folder / f"dcp-{number}"
        dcp.save(place.saved, storage_writer=dcp.FileSystemWriter(path))
        return path

    yield Way("DCP as it comes", "DCP as it comes", save, loads={"DCP": load})
    for group, crc in (("DCP tuned", True), ("DCP tuned, no CRC-32", False)):
        for threads in (1, 2):
            for in_place in (False, True):
                yield _tuned(place, group, threads=threads, in_place=in_place, crc=crc)


def _tuned(place: Place, group: str, *, threads: int, in_place: bool, crc: bool) -> Way:
    """DCP with a cached plan. `in_place`: into the folder of the last save, whose files it truncates and rewrites."""
    name = f"{group}, {threads} thread{'s'[: threads - 1]}, {'same folder' if in_place else 'new folder'}"
    stem = f"dcp-tuned-{threads}"

    def save(number: int) -> Path:
        path = place.folder / (stem if in_place else f"{stem}-{number}")
        planner = CachingPlanner(place.shape)  # its class caches the plans
        writer = dcp.FileSystemWriter(
            path, single_file_per_rank=True, sync_files=True, thread_count=threads, overwrite=True
        )
        with torch_crc(crc):
            dcp.save(place.saved, storage_writer=writer, planner=planner)
        assert planner.was_cached or number == 1, "DCP planned anew"
        return path

    return Way(name, group, save, stays=in_place)


@contextmanager
def torch_crc(wanted: bool) -> Iterator[None]:
    """Set whether torch.save computes CRC-32, which torch.load never checks."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(wanted)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


# ---- one file per rank with its own shards: without planning, and without metadata to combine them


def _of_files(place: Place) -> Iterator[Way]:
    rank = place.world.rank

    def torch_load(path: Path) -> dict[str, Tensor]:
        loaded: dict[str, Tensor] = torch.load(path / f"{rank}", mmap=False, weights_only=True)
        return loaded

    def safetensors_pread(path: Path) -> dict[str, Tensor]:
        return safetensors.torch.load_file(path / f"{rank}", backend="pread")

    def safetensors_mapped(path: Path) -> None:
        for name, tensor in safetensors.torch.load_file(path / f"{rank}").items():
            place.target[name].to_local().copy_(tensor)  # else no data would be read from the mapped file

    of_safetensors = {"safetensors, pread": safetensors_pread, "safetensors, mapped and copied": safetensors_mapped}
    for group, write, loads in (
        ("torch.save", torch.save, {"torch.load": torch_load}),
        ("safetensors", safetensors.torch.save_file, of_safetensors),
    ):
        yield _file_way(place, group, write, in_place=False, loads=loads)
        yield _file_way(place, group, write, in_place=True)


def _file_way(
    place: Place, group: str, write: Callable[..., None], *, in_place: bool, loads: dict[str, Load] | None = None
) -> Way:
    local = place.local

    def save(number: int) -> Path:
        folder = place.folder / (group if in_place else f"{group}-{number}")
        folder.mkdir(exist_ok=True)
        path = folder / f"{place.world.rank}"
        write(local, path)
        _sync(path)
        return folder

    name = f"{group}, {'same file' if in_place else 'new file'}"
    return Way(name, group, save, stays=in_place, loads=loads or {})


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ---- only the raw bytes


class RawFiles:
    """This rank's data in blocks of 4 MiB, written and read only by system calls."""

    def __init__(self, place: Place) -> None:
        self._threads = place.threads
        self._folder = place.folder
        self._rank = place.world.rank
        self._out = blocks_of(place.saved)
        self._in = blocks_of(place.target)
        self.size_bytes = sum(tensor.nbytes for tensor in place.local.values())

    def path(self, name: str) -> Path:
        return self._folder / f"raw-{name}-{self._rank}"

    def write(self, name: str) -> None:
        """Overwrite the file with this name, or create it, and sync it to disk."""
        descriptor = os.open(self.path(name), os.O_WRONLY | os.O_CREAT)
        os.ftruncate(descriptor, self.size_bytes)
        self._each(lambda number, block: _whole(os.pwritev(descriptor, block, number * BLOCK_BYTES), block), self._out)
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self, name: str) -> None:
        """Read the file into the target."""
        descriptor = os.open(self.path(name), os.O_RDONLY)
        self._each(lambda number, block: _whole(os.preadv(descriptor, block, number * BLOCK_BYTES), block), self._in)
        os.close(descriptor)

    def digest(self) -> None:
        """Compute the same digests as for toolkit's files."""

        def work(_: int, block: list[memoryview]) -> None:
            digest = xxhash.xxh3_128()
            for part in block:
                digest.update(part)
            digest.hexdigest()

        self._each(work, self._out)

    def remove(self, name: str) -> None:
        self.path(name).unlink()

    def _each(self, work: Callable[[int, list[memoryview]], None], blocks: list[list[memoryview]]) -> None:
        if self._threads == 1:
            for number, block in enumerate(blocks):
                work(number, block)
            return
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, range(len(blocks)), blocks))


def blocks_of(state: State) -> list[list[memoryview]]:
    """Return the bytes of this rank's shards, in order, split into blocks."""
    blocks: list[list[memoryview]] = [[]]
    room = BLOCK_BYTES
    for tensor in state.values():
        rest = tensor.to_local().reshape(-1).view(torch.uint8).numpy().data
        while len(rest):
            part, rest = rest[:room], rest[room:]
            blocks[-1].append(part)
            room -= len(part)
            if not room:
                blocks.append([])
                room = BLOCK_BYTES
    return [block for block in blocks if block]


def _whole(count: int, block: list[memoryview]) -> None:
    assert count == sum(map(len, block)), "a system call processed only part of a block"


def drop_from_memory(path: Path) -> None:
    """Drop a file, or the files of a folder, from the page cache (posix_fadvise); they must be synced to disk."""
    for file in path.iterdir() if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def remove(path: Path) -> None:
    shutil.rmtree(path)
