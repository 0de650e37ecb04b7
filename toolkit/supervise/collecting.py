"""Collect the steps of one node's ranks into a file of windows. The guard of the node's first rank does this."""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.collector import Collector
from toolkit.metrics.ring import RingReader, rings_of
from toolkit.metrics.window_file import WindowFile
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.node_state import STATE_PERIOD_S, NodeState
from toolkit.supervise.usage import DRIVER, is_first_of_node, nvidia_gpus
from toolkit.terminal.talk import say_beside

__all__ = ["collection_of_node"]

PERIOD_S = 1.0
_JOIN_S = 2.0  # time for a write that hangs on the file system of the run directory


@dataclass
class NodeCollection:
    """The rings and the windows of one node. `launcher` is the pid of the parent of the ranks' guards."""

    attempt: AttemptDirectory
    launcher: int
    first_rank: int
    visible_gpus: str | None = None  # the value of CUDA_VISIBLE_DEVICES
    _problems: set[str] = field(default_factory=set)
    _rings: dict[tuple[Path, int], RingReader | None] = field(default_factory=dict)  # None: damaged, or of another node
    _collector: Collector = field(default_factory=lambda: Collector(socket.gethostname()))
    _file: WindowFile | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Collect in the background until `finish`."""
        self._thread = threading.Thread(target=self._collect_until_over, name="windows", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Write the windows of the last steps, once this node's first rank has exited."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _collect_until_over(self) -> None:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, signal.valid_signals()
        )  # the thread that waits for the rank handles them
        state = NodeState(self.attempt, socket.gethostname(), self.launcher, self.first_rank)
        gpus = nvidia_gpus(self.visible_gpus) if DRIVER.exists() else None
        state_at = time.monotonic()
        while not self._over.wait(PERIOD_S):
            self._trying(lambda: self.collect(time.time()))
            if time.monotonic() >= state_at:
                state_at += STATE_PERIOD_S
                self._trying(lambda: state.write(gpus))
        self._trying(lambda: self.collect(math.inf))

    def _trying(self, part: Callable[[], None]) -> None:
        """Call a part; report each problem once, since the run does not depend on its metrics."""
        try:
            part()
        except (OSError, ToolkitError) as error:
            if str(error) not in self._problems:
                self._problems.add(str(error))
                say_beside(f"cannot observe this node: {error}")

    def collect(self, now: float) -> None:
        """Write the windows of the slots that are over at `now`."""
        self._find_rings()
        windows = self._collector.collect([ring for ring in self._rings.values() if ring is not None], now)
        if windows and self._file is None:
            self._file = WindowFile(self.attempt.windows_file(self.first_rank), socket.gethostname())
        if self._file is not None:
            self._file.append(windows)

    def _find_rings(self) -> None:
        """Open the new rings of this node. Another node of the run may share its shared memory in a test cluster."""
        for path in rings_of(self.attempt.run.run_id, self.attempt.number):
            try:
                key = (path, path.stat().st_ino)
                if key in self._rings:
                    continue
                ring = RingReader(path)
                self._rings[key] = ring if ring.launcher == self.launcher else None
            except FileNotFoundError:  # the rank has exited, or is creating the ring
                continue
            except ToolkitError as error:
                self._rings[key] = None
                say_beside(str(error))


def collection_of_node(attempt: AttemptDirectory, rank: int, environ: Mapping[str, str]) -> NodeCollection | None:
    """Return the collection of this rank's node if it is the node's first rank; None for any other rank."""
    if not is_first_of_node(rank, environ):
        return None
    return NodeCollection(attempt, os.getppid(), rank, environ.get("CUDA_VISIBLE_DEVICES"))
