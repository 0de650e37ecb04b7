"""Start ranks as processes of this machine, each with a process group, and wait for them.

The tests' fork server has imported torch and the job, so that a rank costs a fork and no import.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.world.facts import World

_CONTEXT = multiprocessing.get_context("forkserver")


def job(
    *,
    args: dict[str, Any] | None = None,
    source: Path | None = None,
    parallel: dict[str, Any] | None = None,
    **train: Any,
) -> ResolvedJob:
    """The shipped `train_lm`, with a model that steps in milliseconds."""
    tables = {
        "train": {"steps": 30, "batch": 8, "micro_batch": 1, "lr": 3e-3, "seed": 7} | train,
        "args": {"layers": 1, "width": 32, "heads": 2, "context": 16, "max_bytes": 100_000} | (args or {}),
        "checkpoint": {"every_steps": 8, "keep_last": 10, "source": str(source or "")},
        "parallel": parallel or {},
    }
    flags = {f"{table}.{key}": Flag(value, "test") for table, keys in tables.items() for key, value in keys.items()}
    return resolve_job(shipped_jobs()["train_lm"], site=None, environ={}, flags=flags)


def launch(
    function: Callable[..., Any], ranks: int, run_dir: Path, *given: Any, attempt: int = 0, timeout_s: float = 240
) -> None:
    """Call `function(world, *given)` on every rank; fail when a rank fails or the time is over.

    What a rank says goes to `run_dir/said-ATTEMPT-RANK`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [
            _CONTEXT.Process(target=_rank, args=(function, store, rank, ranks, run_dir, attempt, given))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        ends_at = time.monotonic() + timeout_s
        try:
            # One failed rank leaves the others waiting in a collective, so they end with it.
            while time.monotonic() < ends_at and any(process.exitcode is None for process in processes):
                if any(process.exitcode for process in processes):
                    break
                time.sleep(0.02)
            codes = [process.exitcode for process in processes]
        finally:  # also when pytest's own time-out comes first
            for process in processes:
                process.kill()
                process.join()
    said = "".join(said_by(run_dir, rank, attempt) for rank in range(ranks))
    assert codes == [0] * ranks, f"exit codes of the ranks: {codes}\n{said}"


def results_of(function: Callable[..., Any], ranks: int, run_dir: Path, *given: Any) -> list[Any]:
    """What `function(world, *given)` returns on each rank, as JSON holds it; fails as `launch` does."""
    launch(_write_result, ranks, run_dir, function, given)
    return [json.loads((run_dir / f"result-{rank}.json").read_text()) for rank in range(ranks)]


def _write_result(world: World, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    (world.run_dir / f"result-{world.rank}.json").write_text(json.dumps(function(world, *given)))


def said_by(run_dir: Path, rank: int, attempt: int = 0) -> str:
    """The output of one rank, or nothing when it never came up."""
    path = run_dir / f"said-{attempt}-{rank}"
    return path.read_text() if path.exists() else ""


def _rank(
    function: Callable[..., Any], store: str, rank: int, ranks: int, run_dir: Path, attempt: int, given: tuple[Any, ...]
) -> None:
    with (run_dir / f"said-{attempt}-{rank}").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = World(
        rank=rank, local_rank=rank, size=ranks, local_size=ranks, node=0, nodes=1,
        host=socket.gethostname(), device="cpu", launcher="local", discovered_by="tests",
        attempt=attempt, run_dir=run_dir,
    )  # fmt: skip
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    dist.barrier()  # a rank that ends before another has connected to it would fail that one
    function(world, *given)
    dist.destroy_process_group()
