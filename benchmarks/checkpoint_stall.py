"""Measure what a background save costs the training: the wait for its copy, and slower steps while it is written.

    python benchmarks/checkpoint_stall.py [--mb 256 1000] [--rounds 7] [--folder DIR]

One rank with one thread on two cores saves a state of 300 tensors. Each round times a plain memcpy of the state into
allocated memory, toolkit's `save_in_background`, and DCP's `async_save` with its own gloo group and a stager that
reuses its memory. Then it times steps of about 20 ms (matmuls) with and without a running save. The first save of each
method, which allocates the memory, is not counted. On cores that share execution units, or that others use, any second
process slows steps: `beside_spinning` is that ratio for a process that only counts. Prints one JSON object; times are
medians in seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from toolkit.checkpoint.checkpointer import Checkpointer
from toolkit.world.facts import World

TARGET_STALL, TARGET_STEP = 2.0, 1.1
MATRICES, VECTORS, WIDTH = 100, 200, 1024
STEP_S = 0.02
STEPS_AT_REST = 40

State = dict[str, torch.Tensor]


def state_of(megabytes: int) -> State:
    """Create 300 float32 tensors: matrices with nearly all of the bytes, and vectors of 4 kB."""
    rows = (megabytes * 10**6 // 4 - VECTORS * WIDTH) // MATRICES // WIDTH
    tensors = {f"layer.{number}.weight": torch.randn(rows, WIDTH) for number in range(MATRICES)}
    return tensors | {f"layer.{number}.vector": torch.randn(WIDTH) for number in range(VECTORS)}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class PlainCopy:
    """Copies every tensor into memory that is already allocated."""

    def __init__(self, state: State) -> None:
        self._copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self._calls = [
            (self._copies[name].data_ptr(), tensor.data_ptr(), tensor.nbytes) for name, tensor in state.items()
        ]

    def __call__(self) -> None:
        for call in self._calls:
            ctypes.memmove(*call)


class Ours:
    def __init__(self, state: State, folder: Path) -> None:
        self._state = state
        world = World(0, 0, 1, 1, 0, 1, "", "cpu", "none", "benchmark")
        self.checkpoints = Checkpointer(folder / "checkpoints", world, keep_last=1)
        self._step = 0

    def __call__(self) -> None:
        self._step += 1
        assert self.checkpoints.save_in_background(self._step, self._state, {})

    def is_under_way(self) -> bool:
        return self.checkpoints._background.is_busy

    def wait(self) -> None:
        self.checkpoints.wait()


class Dcp:
    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._folder = state, folder / "dcp"
        self._group = dist.new_group(backend="gloo")
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)

    def __call__(self) -> None:
        writer = dcp.FileSystemWriter(self._folder)
        self._future = dcp.async_save(
            self._state, storage_writer=writer, process_group=self._group, async_stager=self._stager
        )

    def is_under_way(self) -> bool:
        return not self._future.done()

    def wait(self) -> None:
        self._future.result()
        shutil.rmtree(self._folder)


def stalls(plain: PlainCopy, ways: dict[str, Ours | Dcp], rounds: int) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {"memcpy": [], **{name: [] for name in ways}}
    for number in range(rounds + 1):
        plain()  # so that caches are warm
        took["memcpy"].append(seconds(plain))
        for name, save in ways.items():
            stall = seconds(save)
            save.wait()
            if number:
                took[name].append(stall)
    return took


def compute_step() -> Callable[[], object]:
    """Return a function that runs matmuls for about `STEP_S`."""
    left, right, out = torch.randn(512, 512), torch.randn(512, 512), torch.empty(512, 512)
    one = min(seconds(lambda: torch.mm(left, right, out=out)) for _ in range(20))
    times = max(1, round(STEP_S / one))

    def step() -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    return step


def step_times(save: Ours | Dcp, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps without a save, and of steps that run entirely during one."""
    step = compute_step()
    at_rest, disturbed = [], []
    for _ in range(rounds):
        os.sync()
        at_rest += [seconds(step) for _ in range(STEPS_AT_REST)]
        save()
        while True:
            took = seconds(step)
            if not save.is_under_way():
                break
            disturbed.append(took)
        save.wait()
    return at_rest, disturbed


def beside_spinning(rounds: int) -> float:
    """Return the slowdown of a step when another process uses the other core, but no memory."""
    step = compute_step()
    alone, beside = [], []
    for _ in range(rounds):
        alone += [seconds(step) for _ in range(STEPS_AT_REST)]
        spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        time.sleep(0.2)  # wait until it runs
        beside += [seconds(step) for _ in range(STEPS_AT_REST)]
        spinning.kill()
        spinning.wait()
    return statistics.median(beside) / statistics.median(alone)


def report(took: dict[str, list[float]], steps: dict[str, tuple[list[float], list[float]]]) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in took.items()}
    found: dict[str, object] = {"memcpy_s": round(medians["memcpy"], 4)}
    for name, (at_rest, disturbed) in steps.items():
        found[name] = {
            "stall_s": round(medians[name], 4),
            "stall_ratio": round(medians[name] / medians["memcpy"], 2),
            "step_at_rest_s": round(statistics.median(at_rest), 5),
            "steps_within_saves": len(disturbed),
            "step_ratio": round(statistics.median(disturbed) / statistics.median(at_rest), 3),
            "step_ratio_of_means": round(statistics.mean(disturbed) / statistics.mean(at_rest), 3),
        }
    return found


def measure(megabytes: int, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    state = state_of(megabytes)
    ways: dict[str, Ours | Dcp] = {"ours": Ours(state, folder), "dcp": Dcp(state, folder)}
    took = stalls(PlainCopy(state), ways, options.rounds)
    return report(took, {name: step_times(save, options.rounds) for name, save in ways.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[256, 1000], help="sizes of the state in MB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: the temporary folder)")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    spinning = beside_spinning(options.rounds)
    results = {}
    for megabytes in options.mb:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            results[f"{megabytes} MB"] = measure(megabytes, options, folder)
            dist.destroy_process_group()
    about = {"tensors": MATRICES + VECTORS, "rounds": options.rounds, "beside_spinning": round(spinning, 3)}
    print(json.dumps(about | {"sizes": results} | bars(results), indent=2))


def bars(results: dict[str, dict]) -> dict[str, object]:
    stall = max(result["ours"]["stall_ratio"] for result in results.values())
    step = max(result["ours"]["step_ratio"] for result in results.values())
    met = stall <= TARGET_STALL and step <= TARGET_STEP
    return {"target_stall_ratio": TARGET_STALL, "target_step_ratio": TARGET_STEP, "met": met}


if __name__ == "__main__":
    main()
