"""The daemons of a cluster: start them with a clean environment, wait for them, say why one refused."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.devcluster.layout import CONTROLLER, ClusterSpec, Layout
from toolkit.devcluster.nodes import enter_command, first_process, process_in_node
from toolkit.devcluster.processes import clean_environment, wait_until
from toolkit.errors import OwnFailureError

START_TIMEOUT_S = 20.0


@dataclass
class Daemon:
    """A daemon on its way up in `node`; `ready` says whether it serves."""

    layout: Layout
    node: str
    program: str
    ready: Callable[[], bool]
    launched: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> None:
        """Wait until it serves.

        Raises:
            OwnFailureError: it ended, or was not ready in time; with the last lines of its log.
        """
        wait_until(lambda: self.ready() or self._has_ended(), START_TIMEOUT_S)
        if not self._has_ended() and self.ready():
            return
        what = "ended" if self._has_ended() else f"was not ready after {START_TIMEOUT_S:g} s"
        message = f"{self.program} in {self.node} {what}; its last words: {last_lines(self.log)}"
        raise OwnFailureError(message, where=str(self.log))

    def _has_ended(self) -> bool:
        # Slurm's daemons go into the background with code 0 when they have begun well.
        code = self.launched.poll()
        if code == 0:
            return process_in_node(self.layout, self.node, self.program) is None
        return code is not None


def launch(
    layout: Layout,
    node: str,
    argv: Sequence[str],
    ready: Callable[[], bool],
    *,
    extra_environment: Mapping[str, str] | None = None,
) -> Daemon:
    """Start a daemon inside `node` with a clean environment, in a session of its own.

    What it prints before it opens its log goes to that log, too.
    """
    program = Path(argv[0]).name
    first = first_process(layout, node)
    if first is None:
        raise OwnFailureError(f"{node} ended while {program} was started", where=str(layout.folder))
    log = layout.logs / (f"{program}.log" if node == CONTROLLER else f"{program}-{node}.log")
    with log.open("ab") as stream:
        launched = subprocess.Popen(
            enter_command(first, argv),
            env={**slurm_environment(layout), **(extra_environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            cwd="/",
        )
    return Daemon(layout, node, program, ready, launched, log)


def start_munged(layout: Layout) -> None:
    """Start munged with the cluster's own key and socket, unless it runs; all nodes use this one socket."""
    if process_in_node(layout, CONTROLLER, "munged") is not None:
        return
    argv = ["munged", "--foreground", "--force", f"--socket={layout.munge_socket}"]
    argv += [f"--key-file={layout.munge_key}", f"--pid-file={layout.sockets}/munged.pid"]
    argv += [f"--log-file={layout.logs}/munged.log", f"--seed-file={layout.state}/munged.seed"]
    layout.munge_socket.unlink(missing_ok=True)
    launch(layout, CONTROLLER, argv, layout.munge_socket.exists).wait()


def start_slurmctld(layout: Layout, spec: ClusterSpec) -> None:
    """Start the controller daemon, unless it runs."""
    if process_in_node(layout, CONTROLLER, "slurmctld") is None:
        argv = ["slurmctld", "-f", str(layout.slurm_conf)]
        launch(layout, CONTROLLER, argv, answers(spec.node_address(CONTROLLER), layout.first_port)).wait()


def start_slurmds(layout: Layout, spec: ClusterSpec) -> None:
    """Start slurmd in every node where it does not run."""
    started = [
        launch(
            layout,
            node,
            ["slurmd", "-f", str(layout.slurm_conf)],
            answers(spec.node_address(node), layout.first_port + 1),
        )
        for node in spec.node_names
        if process_in_node(layout, node, "slurmd") is None
    ]
    for daemon in started:
        daemon.wait()


def running_daemons(layout: Layout, spec: ClusterSpec) -> dict[str, bool]:
    """Every daemon that the cluster should have: whether it runs."""
    programs = ["munged", "slurmctld"] + (["mariadbd", "slurmdbd"] if spec.accounting else [])
    running = {name: process_in_node(layout, CONTROLLER, name) is not None for name in programs}
    for node in spec.node_names:
        running[f"slurmd {node}"] = process_in_node(layout, node, "slurmd") is not None
    return running


def slurm_environment(layout: Layout) -> dict[str, str]:
    """A clean environment that points at this cluster."""
    return clean_environment(SLURM_CONF=str(layout.slurm_conf))


def last_lines(log: Path, count: int = 5) -> str:
    """The last lines of a log as one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or "(nothing)"


def answers(address: str, port: int) -> Callable[[], bool]:
    """A check whether somebody listens at `address`:`port`."""

    def check() -> bool:
        try:
            with socket.create_connection((address, port), timeout=1.0):
                return True
        except OSError:
            return False

    return check
