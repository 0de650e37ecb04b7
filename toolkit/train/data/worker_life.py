"""Signals and exit of a loader worker, which obeys only its own rank and exits with it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from toolkit.supervise.parent_death import signal_on_parent_death

# Slurm and the supervisor send these signals to every process of a job, but only ranks may act on them.
_FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class SettleWorker:
    """Initializes a DataLoader worker so that it ignores stop requests and exits with its rank.

    After a stop request, the rank still reads batches until it has saved, and would fail if a worker exited.
    """

    rank_process: int
    lives_with: bool  # True if the main thread forks: the kernel kills the worker when the forking thread exits

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_RANKS)
        threading.Thread(target=_obey, args=(self.rank_process,), name="signals", daemon=True).start()
        if self.lives_with:
            signal_on_parent_death(signal.SIGKILL)
            if os.getppid() != self.rank_process:  # the rank exited before the request to the kernel
                os._exit(1)


def _obey(rank_process: int) -> None:
    while True:
        heard = signal.sigwaitinfo(_FOR_RANKS)
        if heard.si_signo == signal.SIGTERM and heard.si_pid == rank_process:
            os._exit(0)


def settle() -> SettleWorker:
    """Return the initializer for the workers that this thread is about to start."""
    # The parent of the other workers is a fork server, which exits with its own parent.
    forks = multiprocessing.get_start_method() == "fork"
    return SettleWorker(os.getpid(), forks and threading.current_thread() is threading.main_thread())


def workers_of(batches: Iterator[Any]) -> list[BaseProcess]:
    """Return the worker processes of a DataLoader iterator, which torch keeps in a private attribute."""
    return list(getattr(batches, "_workers", []))


def kill(workers: Sequence[BaseProcess]) -> None:
    """Kill workers that have not exited on request, because they hang in a read."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join(5)
