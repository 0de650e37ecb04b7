"""The life of a worker process: it obeys its own rank only, and exits with it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from toolkit.supervise.parent_death import signal_on_parent_death

# Signals of Slurm and the supervisor to every process of a job, which only ranks obey.
_FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class SettleWorker:
    """Runs first in each worker of a DataLoader: stop requests are for the rank, which reads until it has saved.

    A worker that exited at a stop request would end the rank in the middle of its last save.
    """

    rank_process: int
    lives_with: bool  # the kernel sends the signal at the end of the forking thread, which must be the main one

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)
        threading.Thread(target=_obey, args=(self.rank_process,), name="signals", daemon=True).start()
        if self.lives_with:
            signal_on_parent_death(signal.SIGKILL)
            if os.getppid() != self.rank_process:  # the parent died before the request to the kernel
                os._exit(1)


def _obey(rank_process: int) -> None:
    while True:
        heard = signal.sigwaitinfo(_FOR_RANKS)
        if heard.si_signo == signal.SIGTERM and heard.si_pid == rank_process:
            os._exit(0)


def settle() -> SettleWorker:
    """Prepare the workers that this thread is about to start."""
    # A fork server is the parent of its workers, and exits with its own parent.
    forks = multiprocessing.get_start_method() == "fork"
    return SettleWorker(os.getpid(), forks and threading.current_thread() is threading.main_thread())


def workers_of(batches: Iterator[Any]) -> list[BaseProcess]:
    """Return the processes of a DataLoader's iterator, a private attribute of torch."""
    return list(getattr(batches, "_workers", []))


def kill(workers: Sequence[BaseProcess]) -> None:
    """Kill workers that remain after the request to exit: they hang in a read."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join(5)
