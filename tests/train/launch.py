"""Start ranks as processes of this machine, each with a process group, and wait for them.

A fork server imports torch once, so that a rank costs a fork and no import.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.world.facts import World

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.checkpoint.state_dict", "toolkit.jobs.train_lm"])


def launch(
    function: Callable[..., Any], ranks: int, *, run_dir: Path, attempt: int = 0, given: tuple[Any, ...] = ()
) -> None:
    """Call `function(world, *given)` on every rank; raise when a rank fails or takes over 100 s."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [
            _CONTEXT.Process(target=_rank, args=(function, store, rank, ranks, run_dir, attempt, given))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=100)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, f"exit codes of the ranks: {codes}"


def _rank(
    function: Callable[..., Any],
    store: str,
    rank: int,
    ranks: int,
    run_dir: Path,
    attempt: int,
    given: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = World(
        rank=rank, local_rank=rank, size=ranks, local_size=ranks, node=0, nodes=1,
        host=socket.gethostname(), device="cpu", launcher="local", discovered_by="tests",
        attempt=attempt, run_dir=run_dir,
    )  # fmt: skip
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    function(world, *given)
    dist.destroy_process_group()
