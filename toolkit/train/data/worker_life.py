"""The life of a worker process: it hears its own rank alone, and does not outlive it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from toolkit.supervise.parent_death import signal_on_parent_death

# What Slurm and the supervisor send to every process of a job, and what only ranks answer.
_FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class SettleWorker:
    """First in each worker of a DataLoader: a stop request is for the rank, which keeps reading until it has saved.

    A worker that died of it would end the rank in the middle of its last save.
    """

    rank_process: int
    lives_with: bool  # the kernel's signal comes with the end of the thread that forked, which must be the main one

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)
        threading.Thread(target=_obey, args=(self.rank_process,), name="signals", daemon=True).start()
        if self.lives_with:
            signal_on_parent_death(signal.SIGKILL)
            if os.getppid() != self.rank_process:  # it died before the kernel was asked
                os._exit(1)


def _obey(rank_process: int) -> None:
    while True:
        heard = signal.sigwaitinfo(_FOR_RANKS)
        if heard.si_signo == signal.SIGTERM and heard.si_pid == rank_process:
            os._exit(0)


def settle() -> SettleWorker:
    """For the workers that this thread is about to start."""
    # A fork server is the parent of what it starts, and goes with its own parent.
    forks = multiprocessing.get_start_method() == "fork"
    return SettleWorker(os.getpid(), forks and threading.current_thread() is threading.main_thread())


def workers_of(batches: Iterator[Any]) -> list[BaseProcess]:
    """The processes of a DataLoader's iterator, which torch keeps to itself."""
    return list(getattr(batches, "_workers", []))


def kill(workers: Sequence[BaseProcess]) -> None:
    """Kill those that are still there after they were asked to end: they hang in a read that does not return."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join(5)
