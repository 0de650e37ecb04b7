"""The program of one rank of `checkpoint_speed.py`: in each round it times and checks all methods sequentially."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_speed_ways import Place, RawFiles, State, Way, drop_from_memory, remove, ways
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from toolkit.checkpoint.loading.planned import PlannedLoad
from toolkit.checkpoint.saving import prepared as saves
from toolkit.world.facts import World

WARM_UP = 3  # rounds: ours overwrites older files from the third save on
STAY_AFTER_WARM_UP = 2  # methods per group, the fastest ones
COPIES = 11  # of the state that exist as files at the same time


@dataclass(frozen=True)
class Case:
    """The number of ranks, and the size of the state that they save together."""

    ranks: int
    megabytes: int
    shapes: tuple[str, ...]
    folders: dict[str, Path]  # by kind: tmpfs or disk
    rounds: int


def shapes_of(shape: str, megabytes: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of float32 tensors of about `megabytes` MB, with rows divisible by 4: 16 large ones, or an LLM.

    The LLM has 37 layers of nine tensors, two embeddings and a norm, and two moments of each of them: 1,008 tensors.
    """
    if shape == "large":
        return {f"layer.{number}": (megabytes * 10**6 // 16 // 4 // 4096 * 4, 1024) for number in range(16)}
    elements = megabytes * 10**6 // (3 * 4)
    width = int(math.sqrt(elements / (37 * 12 + 16))) // 12 * 12
    words = (elements - 37 * 12 * width**2) // (2 * width) // 4 * 4
    layer = {"query": (width, width), "key": (width, width), "value": (width, width), "out": (width, width)}
    layer |= {"gate": (8 * width // 3, width), "up": (8 * width // 3, width), "down": (width, 8 * width // 3)}
    model: dict[str, tuple[int, ...]] = {"embedding": (words, width), "head": (words, width), "norm": (width,)}
    for number in range(37):
        norms = {"norm1": (width,), "norm2": (width,)}
        model |= {f"layers.{number}.{name}": sizes for name, sizes in {**layer, **norms}.items()}
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    return {f"{kind}.{name}": sizes for kind in kinds for name, sizes in model.items()}


def state_of(shapes: dict[str, tuple[int, ...]], mesh: DeviceMesh, fill: Callable[..., Tensor]) -> State:
    return {
        name: DTensor.from_local(fill(sizes[0] // mesh.size(), *sizes[1:]), mesh, [Shard(0)])
        for name, sizes in shapes.items()
    }


def one_rank(rank: int, case: Case, store: Path) -> None:
    """Measure a case; rank 0 writes the results as JSON next to the store."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # DCP warns about requested settings
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.ranks)
    mesh = init_device_mesh("cpu", (case.ranks,))
    results = []
    began = time.monotonic()
    for shape in case.shapes:
        shapes = shapes_of(shape, case.megabytes)
        torch.manual_seed(rank)
        saved, target = state_of(shapes, mesh, torch.randn), state_of(shapes, mesh, torch.zeros)
        size_bytes = sum(math.prod(sizes) * 4 for sizes in shapes.values())
        for kind, folder in case.folders.items():
            about = {"ranks": case.ranks, "megabytes": case.megabytes, "state": shape, "folder": kind}
            about |= {"tensors": len(shapes), "bytes": size_bytes}
            if missing := room_missing(folder, size_bytes, is_memory=kind == "tmpfs"):
                results.append({**about, "left_out": missing})
                continue
            inside = folder / f"{shape}-{kind}"
            if rank == 0:
                inside.mkdir()
            dist.barrier()
            threads = max(1, min(len(os.sched_getaffinity(0)) // case.ranks, 4))
            place = Place(world_of(rank, case.ranks), inside, saved, target, threads, shape)
            measured = Measuring(place, on_disk=kind == "disk").run(case.rounds)
            results.append({**about, "threads_of_ours": threads, **measured})
            dist.barrier()
            if rank == 0:
                remove(inside)
                print(f"  {shape}, {kind}: after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if rank == 0:
        store.with_name("results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def world_of(rank: int, ranks: int) -> World:
    return World(rank, rank, ranks, ranks, 0, 1, os.uname().nodename, "cpu", "none", "benchmark")


def room_missing(folder: Path, size_bytes: int, *, is_memory: bool) -> str:
    """Return why a case is skipped, the same on every rank; "" if it runs."""
    free = shutil.disk_usage(folder).free
    if is_memory:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = min(free, int(lines["MemAvailable"].split()[0]) * 1024)
    needed = COPIES * size_bytes
    answer = [f"needs {needed / 1e9:.0f} GB, free are {free / 1e9:.0f} GB" if free < needed * 1.1 else ""]
    dist.broadcast_object_list(answer)
    return answer[0]


class Measuring:
    """Measures all methods of one case. Collective."""

    def __init__(self, place: Place, *, on_disk: bool) -> None:
        self._place = place
        self._on_disk = on_disk
        self._raw = RawFiles(place)
        self._took: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._span = 0.0

    def run(self, rounds: int) -> dict[str, Any]:
        """Return medians in seconds by operation and method, and the fastest method of each group."""
        tried = ways(self._place)
        gc.collect()
        gc.freeze()
        gc.disable()  # for all methods
        with self._spans():
            for number in range(1, WARM_UP + rounds + 1):
                if number == WARM_UP + 1:
                    tried = self._fastest(tried)
                    self._took.clear()
                self._one_round(tried, number)
        gc.enable()
        gc.unfreeze()
        medians = {
            what: {name: statistics.median(times) for name, times in by_name.items()}
            for what, by_name in self._took.items()
        }
        best: dict[str, str] = {}
        for way in tried:
            if way.group not in best or medians["save"][way.name] < medians["save"][best[way.group]]:
                best[way.group] = way.name
        return {"median_s": medians, "fastest": best, "load_average": os.getloadavg()[0]}

    def _one_round(self, tried: list[Way], number: int) -> None:
        for way in tried:
            made: list[Path] = []
            self._timed("save", way.name, lambda: made.append(way.save(number)))  # noqa: B023
            if self._span:
                self._note("phase", f"{way.name}: write", self._span)
            for name, load in way.loads.items():
                self._loaded("load", name, lambda: load(made[0]))  # noqa: B023
                if self._on_disk:
                    self._forget(made[0])
                    self._loaded("cold load", name, lambda: load(made[0]))  # noqa: B023
            if not way.stays and self._place.world.rank == 0:
                remove(made[0])
        self._raw_round(number)

    def _raw_round(self, number: int) -> None:
        """Write and read only the raw bytes. Times are those of the slowest rank's own work, as for our phases."""
        raw = self._raw
        for name, what in ((f"new-{number}", "raw write, new files"), ("same", "raw write, same files")):
            self._timed("raw", what, self._spanned(lambda: raw.write(name)))  # noqa: B023
            self._note("phase", what, self._span)
        self._timed("raw", "raw read", self._spanned(lambda: raw.read("same")))
        self._note("phase", "raw read", self._span)
        self._check({})
        if self._on_disk:
            drop_from_memory(raw.path("same"))
            self._timed("raw", "cold raw read", self._spanned(lambda: raw.read("same")))
            self._note("phase", "cold raw read", self._span)
        self._timed("raw", "xxh3", self._spanned(raw.digest))
        self._note("phase", "xxh3 of the bytes", self._span)
        raw.remove(f"new-{number}")

    def _loaded(self, what: str, name: str, load: Callable[[], dict[str, Tensor] | None]) -> None:
        for tensor in self._place.target.values():
            tensor.to_local().zero_()
        found: list[dict[str, Tensor] | None] = []
        self._timed(what, name, lambda: found.append(load()))
        if self._span:
            self._note("phase", f"{name}: {what.replace('load', 'read')}", self._span)
        self._check(found[0] or {})

    def _check(self, found: dict[str, Tensor]) -> None:
        """Compare the loaded tensors with the saved ones bit by bit."""
        for name, tensor in self._place.saved.items():
            loaded = found[name] if found else self._place.target[name].to_local()
            assert torch.equal(loaded.view(torch.int32), tensor.to_local().view(torch.int32)), name

    def _timed(self, what: str, name: str, work: Callable[[], object]) -> None:
        """Record the seconds until the last rank has finished."""
        gc.collect()
        if self._on_disk and self._place.world.rank == 0:
            os.sync()  # else this case would include the removal of earlier files
        self._span = 0.0
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        self._took[what][name].append(time.perf_counter() - start)
        span = torch.tensor([self._span], dtype=torch.float64)
        dist.all_reduce(span, op=dist.ReduceOp.MAX)
        self._span = float(span)

    def _note(self, what: str, name: str, seconds: float) -> None:
        self._took[what][name].append(seconds)

    def _spanned(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, which also stores its own duration in `_span`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = work(*args, **kwargs)
            self._span += time.perf_counter() - start
            return result

        return timed

    @contextmanager
    def _spans(self) -> Iterator[None]:
        """Time the functions that write a rank's files, and that read them by a plan."""
        places: list[tuple[Any, str]] = [(saves, "write_shard"), (saves, "write_digests"), (PlannedLoad, "read")]
        before = [getattr(owner, name) for owner, name in places]
        for (owner, name), work in zip(places, before, strict=True):
            setattr(owner, name, self._spanned(work))
        try:
            yield
        finally:
            for (owner, name), work in zip(places, before, strict=True):
                setattr(owner, name, work)

    def _forget(self, path: Path) -> None:
        dist.barrier()
        if self._place.world.rank == 0:
            drop_from_memory(path)

    def _fastest(self, tried: list[Way]) -> list[Way]:
        """Return the fastest methods of each group in the warm-up, in the old order; the same on all ranks."""
        groups: dict[str, list[Way]] = defaultdict(list)
        for way in tried:
            groups[way.group].append(way)
        stay = [
            way.name
            for group in groups.values()
            for way in sorted(group, key=lambda way: min(self._took["save"][way.name]))[:STAY_AFTER_WARM_UP]
        ]
        dist.broadcast_object_list(stay)
        return [way for way in tried if way.name in stay or way.loads]
