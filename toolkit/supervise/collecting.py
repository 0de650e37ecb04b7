"""Observe one node: its usage, its state, and the windows of its ranks' steps. The guard of its first rank does this."""

import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.metrics.collector import Collector
from toolkit.metrics.own import OwnLog
from toolkit.metrics.ring import RingReader, rings_of
from toolkit.metrics.window_file import WindowFile
from toolkit.metrics.windows import declared_metrics
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.gpus import nvidia_gpus
from toolkit.supervise.node_state import STATE_PERIOD_S, NodeState
from toolkit.supervise.usage import NodeUsage
from toolkit.terminal.talk import say_beside

__all__ = ["collection_of_node"]

PERIOD_S = 1.0
REQUEST_PERIOD_S = 5.0  # between checks for a request of stacks, on the file system of all nodes
QUIET_S = 20.0  # without steps, after which a request may come at any time
USAGE_PERIOD_S = 30.0  # the first samples are 1, 2, 4, ... s apart
_JOIN_S = 2.0  # time for a write that hangs on the file system of the run directory


@dataclass
class NodeCollection:
    """What one node records. `launcher` is the pid of the process that started the ranks."""

    attempt: AttemptDirectory
    launcher: int
    first_rank: int
    visible_gpus: str | None = None  # the value of CUDA_VISIBLE_DEVICES
    is_signalled: bool = False  # whether the launcher forwards the request of stacks as a signal
    resolved_job: str = ""
    _problems: set[str] = field(default_factory=set)
    _rings: dict[tuple[Path, int], RingReader | None] = field(default_factory=dict)  # None: damaged, or of another node
    _collector: Collector = field(default_factory=lambda: Collector(socket.gethostname()))
    _file: WindowFile | None = None
    _own: OwnLog | None = None
    _stacks_asked_ns: int = 0
    _request_at: float = 0.0  # when to check for a request of stacks
    _stepped_at: float = -math.inf  # when the last windows were written
    _usage: NodeUsage = field(init=False)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._usage = NodeUsage(self.attempt.usage_file(self.first_rank), self.launcher, self.first_rank)

    def start(self) -> None:
        """Collect in the background until `finish`."""
        self._thread = threading.Thread(target=self._collect_until_over, name="node", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Write the windows of the last steps and the last usage, once this node's first rank has exited."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _collect_until_over(self) -> None:
        # The thread that waits for the rank handles signals. NVML is queried here, as its driver may hang.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        state = NodeState(self.attempt, socket.gethostname(), self.launcher, self.first_rank)
        gpus = self._usage.gpus = nvidia_gpus(self.visible_gpus)
        state_at, pause_s = time.monotonic(), PERIOD_S
        usage_at = state_at + pause_s
        self._trying(self._begin_own)
        while not self._over.wait(PERIOD_S):
            now = time.monotonic()
            if now >= usage_at:
                pause_s = min(USAGE_PERIOD_S, 2 * pause_s)
                usage_at = now + pause_s
                self._usage.sample()
            self._trying(lambda: self.collect(time.time()))
            self._trying(lambda: self._ask_for_stacks(state))
            if now >= state_at:
                state_at += STATE_PERIOD_S
                self._trying(lambda: state.write(gpus))
        self._trying(lambda: self.collect(math.inf))
        if self._own is not None:
            self._trying(self._own.close)
        self._usage.finish()

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
        self._stepped_at = time.monotonic() if windows else self._stepped_at
        if windows and self._file is None:
            self._file = WindowFile(self.attempt.windows_file(self.first_rank), socket.gethostname())
        if self._file is not None:
            self._file.append(windows)
        if self._own is not None:
            self._trying(self._own.flush)

    def _begin_own(self) -> None:
        """Record the metrics of the program itself, except those whose means the supervisor writes; on rank 0's node."""
        if self.first_rank == 0:
            job = read_json(Path(self.resolved_job)) if self.resolved_job else {}
            means = [name for name, is_mean in declared_metrics(job).items() if is_mean]
            own = self._own = OwnLog(self.attempt.run.metrics, self.attempt.number, means)
            # The windows must not depend on it.
            self._collector.own = lambda steps: self._trying(lambda: own.add(steps))

    def _ask_for_stacks(self, state: NodeState) -> None:
        """Make the guards of this node keep the stacks of their ranks if the supervisor, on another node, requests it."""
        now = time.monotonic()
        if self.is_signalled or (now < self._request_at and now - self._stepped_at < QUIET_S):
            return
        self._request_at = now + REQUEST_PERIOD_S
        try:
            asked_ns = self.attempt.stacks_request.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if asked_ns != self._stacks_asked_ns:
            self._stacks_asked_ns = asked_ns
            if self.attempt.stacks_request.read_text(encoding="utf-8").strip() == socket.gethostname():
                return  # the supervisor has signalled them itself
            state.signal_guards(signal.SIGUSR1)

    def _find_rings(self) -> None:
        """Open the new rings of this node. Another node of the run may share its shared memory in a test cluster."""
        for path in rings_of(self.attempt.run.run_id, self.attempt.number):
            try:
                key = (path, path.lstat().st_ino)
                if key in self._rings:
                    continue
                ring = RingReader(path)
                self._rings[key] = ring if ring.launcher == self.launcher else None
            except OSError:  # the rank has exited or is creating the ring, or the file is not one of this user
                continue
            except ToolkitError as error:
                self._rings[key] = None
                say_beside(str(error))


def collection_of_node(
    attempt: AttemptDirectory, rank: int, launcher: int, environ: Mapping[str, str]
) -> NodeCollection | None:
    """Return the collection of this rank's node if it is the node's first rank; None for any other rank.

    Launchers fill one node after another. One process starts the ranks of each node: slurmstepd, the daemon of mpirun, or
    the supervisor.
    """
    if not is_first_of_node(rank, environ):
        return None
    is_signalled = environ.get("TOOLKIT_LAUNCHER") == "srun" and environ.get("TOOLKIT_FOREIGN") != "1"
    gpus, job = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("TOOLKIT_RESOLVED_JOB", "")
    return NodeCollection(attempt, launcher, rank, gpus, is_signalled, job)


def is_first_of_node(rank: int, environ: Mapping[str, str]) -> bool:
    if environ.get("TOOLKIT_LAUNCHER") == "srun":  # components may have different ranks per node
        return environ.get("SLURM_LOCALID") == "0"
    per_node = environ.get("TOOLKIT_RANKS_PER_NODE", "")
    return per_node.isdigit() and not rank % max(1, int(per_node))
