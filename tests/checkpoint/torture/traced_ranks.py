"""Real ranks whose system calls are recorded, or answered with an error or SIGKILL: processes under strace.

Faults strike below Python, HDF5 and every thread of the process, so that they need know nothing of how a save is done.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from committed_states import ALONE

from toolkit.checkpoint.format.filters import Compression
from toolkit.errors import ToolkitError
from toolkit.world.facts import World

# All calls that change a file system. Those with a question mark do not exist on every processor.
CHANGING = (
    "write", "pwrite64", "writev", "pwritev", "pwritev2", "copy_file_range", "sendfile", "?open", "openat", "?creat",
    "ftruncate", "fallocate", "fsync", "fdatasync", "sync_file_range", "msync", "?rename", "?renameat", "renameat2",
    "?mkdir", "mkdirat", "?unlink", "unlinkat", "?rmdir", "?link", "linkat", "symlinkat", "fchmod", "?chmod",
)  # fmt: skip
RANKS_END_S = 120.0
_SURVIVORS_END_S = 2.0
_PR_SET_PTRACER = 0x59616D61
Work = Callable[..., None]
GoOn = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """What befalls the `number`-th of the calls of one name in one thread of a rank: "signal=KILL", "error=EIO".

    SIGKILL comes before the call is made, SIGSTOP after it.
    """

    call: str
    number: int
    action: str
    rank: int = 0


@dataclass
class Ended:
    """How one rank ended: its exit code, what it told, what it said on stderr."""

    code: int | None
    told: list[Any]
    stderr: str
    seconds: float


@dataclass
class Tracing:
    """One strace a rank. `logs` are where they write; by default with the paths of file descriptors (-y)."""

    calls: Sequence[str] = CHANGING
    options: Sequence[str] = ("-y",)
    faults: Sequence[Fault] = ()
    logs: list[Path] = field(default_factory=list)


def require_strace() -> None:
    """Skip without strace; where `make test` has installed everything it must be there."""
    if shutil.which("strace") is None:
        missing = "strace is not installed (`make packages` installs it)"
        if os.environ.get("TOOLKIT_REQUIRE_CLUSTER") == "1":
            pytest.fail(f"TOOLKIT_REQUIRE_CLUSTER=1, but {missing}")
        pytest.skip(missing)


def run_ranks(
    folder: Path,
    work: Work,
    arguments: tuple[Any, ...],
    *,
    size: int = 1,
    attempt: int = 1,
    tracing: Tracing | None = None,
    kill_after_s: float | None = None,
    while_stopped: Callable[[GoOn], None] | None = None,
) -> list[Ended]:
    """Run `work(world, tell, *arguments)` on new ranks, and return how they ended.

    Args:
        folder: for files of this run alone, outside the folder under test.
        kill_after_s: SIGKILL for all ranks, so long after the work began.
        while_stopped: called while rank 0 stands still, stopped by a fault ("signal=STOP"). It may let the rank live
            to its end by calling what it is given; otherwise the rank goes on afterwards.
    """
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_live, args=(rank, size, attempt, folder, theirs, work, arguments))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    told: list[list[Any]] = [[] for _ in ranks]
    tracers = []
    try:
        for rank, (process, pipe) in enumerate(ranks):
            assert pipe.poll(RANKS_END_S) and pipe.recv() == "ready"
            if tracing is not None:
                tracers.append(_trace(process.pid, rank, folder, tracing))
        began = time.monotonic()
        for _, pipe in ranks:
            pipe.send("go")
        if while_stopped is not None and _stands_still(ranks[0][0]):
            go_on = partial(_go_on, ranks[0][0], tracers[0])
            while_stopped(go_on)
            go_on(wait_s=0.0)
        ended_s = _await_ends(ranks, told, began, kill_after_s)
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
        for tracer in tracers:
            tracer.wait(RANKS_END_S)
            tracer.stderr.close()
    return [
        Ended(process.exitcode, told[rank], (folder / f"stderr-{rank}").read_text(), ended_s[rank])
        for rank, (process, _) in enumerate(ranks)
    ]


def _stands_still(process: Any) -> bool:
    """Wait until a process is stopped for good, and not just for its tracer; False where it ends without."""
    stopped = 0
    while process.is_alive() and stopped < 10:
        try:
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # it has ended in this moment
            return False
        stopped = stopped + 1 if state in "tT" else 0
        time.sleep(0.002)
    return stopped >= 10


def _go_on(process: Any, tracer: subprocess.Popen[str], wait_s: float = RANKS_END_S) -> None:
    """End a stop, and wait for the end of the process."""
    tracer.kill()  # it would not let a process with several threads go on
    tracer.wait()
    if process.is_alive():
        os.kill(process.pid, signal.SIGCONT)
        process.join(wait_s)


def _await_ends(
    ranks: list[tuple[Any, Connection]], told: list[list[Any]], began: float, kill_after_s: float | None
) -> list[float]:
    """Wait until all ranks have ended, some by us: those that wait for a dead one, and all when their time is up."""
    ended_s = [0.0 for _ in ranks]
    deadline = began + (RANKS_END_S if kill_after_s is None else kill_after_s)
    while any(process.is_alive() for process, _ in ranks):
        alive = [process for process, _ in ranks if process.is_alive()]
        if len(alive) < len(ranks):
            deadline = min(deadline, time.monotonic() + _SURVIVORS_END_S)
        if time.monotonic() >= deadline:
            assert kill_after_s is not None or len(alive) < len(ranks), "the ranks do not end"
            for process in alive:
                process.kill()
        for rank, (process, pipe) in enumerate(ranks):
            _hear(pipe, told[rank])
            if process.is_alive():
                ended_s[rank] = time.monotonic() - began
        time.sleep(0.001)
    for rank, (_, pipe) in enumerate(ranks):
        _hear(pipe, told[rank])
    return ended_s


def _hear(pipe: Connection, told: list[Any]) -> None:
    try:
        while pipe.poll():
            told.append(pipe.recv())
    except (EOFError, ConnectionResetError):
        return


def _trace(pid: int, rank: int, folder: Path, tracing: Tracing) -> subprocess.Popen[str]:
    """Attach strace to a rank that waits; returns when every call from now on is seen."""
    log = folder / f"calls-{rank}"
    tracing.logs.append(log)
    argv = ["strace", "-f", "-p", str(pid), "-o", str(log), *tracing.options]
    argv += ["-e", "signal=none", "-e", f"trace={','.join(tracing.calls)}"]
    for fault in tracing.faults:
        if fault.rank == rank:
            argv += ["-e", f"inject={fault.call}:{fault.action}:when={fault.number}"]
    tracer = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    assert "attached" in said, f"strace: {said}{tracer.stderr.read()}"
    return tracer


def _live(
    rank: int, size: int, attempt: int, folder: Path, pipe: Connection, work: Work, arguments: tuple[Any, ...]
) -> None:
    """One rank. A refusal by toolkit is told; everything else ends it with a traceback."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, -1, 0, 0, 0)  # where only a parent may trace
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    torch.set_num_threads(1)
    if size > 1:
        store = f"file://{folder}/store"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=RANKS_END_S)
        )
    world = replace(ALONE, rank=rank, local_rank=rank, size=size, local_size=size, attempt=attempt)
    pipe.send("ready")
    pipe.recv()
    try:
        work(world, pipe.send, *arguments)
    except ToolkitError as error:
        pipe.send({"error": str(error), "kind": type(error).__name__})
        os._exit(3)
    os._exit(0)


def end_tracing() -> None:
    """For a traced rank: no fault befalls it any more."""
    status = Path("/proc/self/status")
    while tracer := int(status.read_text().partition("TracerPid:")[2].split()[0]):
        os.kill(tracer, signal.SIGKILL)
        time.sleep(0.001)


def save_all(
    world: World,
    tell: Callable[[Any], None],
    directory: Path,
    steps: list[int],
    large: bool = False,
    in_background: bool = False,
    compression: Compression = "none",
) -> None:
    """Save steps one after the other; tell of each that begins and of each whose save has returned.

    In the background, the tensors change as soon as training may go on.
    """
    from committed_states import json_of, tensors_of

    from toolkit.checkpoint import Checkpointer
    from toolkit.checkpoint.folder.deletion import await_deletions

    checkpoints = Checkpointer(directory, world, keep_last=2, compression=compression)
    for step in steps:
        name = (step, world.attempt)
        tell({"begun": name})
        tensors = tensors_of(name, [world.rank], large=large)
        if in_background:
            checkpoints.save_in_background(step, tensors, json_of(name))
            for tensor in tensors["model"].values():
                tensor.zero_()
            checkpoints.wait()
        else:
            checkpoints.save(step, tensors, json_of(name))
        tell({"returned": name})
    assert await_deletions(RANKS_END_S)
