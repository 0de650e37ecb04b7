"""Start the daemons of a dev cluster with a clean environment, wait for them, and report why one failed."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.devcluster.layout import CONTROLLER, ClusterSpec, Layout
from toolkit.devcluster.nodes import enter_command, first_process, process_in_node
from toolkit.devcluster.packages import SEARCH_PATH
from toolkit.devcluster.processes import clean_environment, wait_until
from toolkit.errors import OwnFailureError

START_TIMEOUT_S = 20.0


@dataclass
class Daemon:
    """A daemon that is starting; `ready` returns True once it accepts requests."""

    name: str
    launched: subprocess.Popen[bytes]
    output: Path
    ready: Callable[[], bool]

    def wait(self) -> None:
        """Wait until the daemon is ready. Raises OwnFailureError with its last lines if it exits or is late."""
        wait_until(lambda: self.launched.poll() is not None or self.ready(), START_TIMEOUT_S)
        code = self.launched.poll()
        if code is None and self.ready():
            return
        problem = f"was not ready after {START_TIMEOUT_S:g} s" if code is None else f"exited with code {code}"
        message = f"{self.name} {problem}; its last lines: {last_lines(self.output)}"
        raise OwnFailureError(message, where=str(self.output))


def launch(
    layout: Layout,
    node: str,
    argv: Sequence[str],
    ready: Callable[[], bool],
    *,
    extra_environment: Mapping[str, str] | None = None,
) -> Daemon:
    """Start a daemon inside `node` with a clean environment, in its own session; its output goes to logs/PROGRAM.out.

    `argv` must keep the daemon in the foreground, so that its exit code is available immediately.
    """
    program = Path(argv[0]).name
    first = first_process(layout, node)
    if first is None:
        raise OwnFailureError(f"{node} exited while {program} was starting", where=str(layout.folder))
    output = layout.logs / (f"{program}.out" if node == CONTROLLER else f"{program}-{node}.out")
    with output.open("wb") as stream:
        launched = subprocess.Popen(
            enter_command(first, argv),
            env={**slurm_environment(layout), **(extra_environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            cwd="/",
        )
    return Daemon(f"{program} in {node}", launched, output, ready)


def start_munged(layout: Layout) -> None:
    """Start munged with the cluster's own key and socket, unless it runs. All nodes share this socket."""
    if process_in_node(layout, CONTROLLER, "munged") is not None:
        return
    # --force: munged would reject the permissions of root's home, but only root uses this cluster.
    argv = ["munged", "--foreground", "--force", f"--socket={layout.munge_socket}"]
    argv += [f"--key-file={layout.munge_key}", f"--pid-file={layout.sockets}/munged.pid"]
    argv += [f"--seed-file={layout.state}/munged.seed"]
    layout.munge_socket.unlink(missing_ok=True)
    launch(layout, CONTROLLER, argv, layout.munge_socket.exists).wait()


def start_slurmctld(layout: Layout) -> None:
    """Start the controller daemon, unless it runs."""
    if process_in_node(layout, CONTROLLER, "slurmctld") is None:
        argv = ["slurmctld", "-D", "-f", str(layout.slurm_conf)]
        launch(layout, CONTROLLER, argv, listens(layout, CONTROLLER, layout.first_port)).wait()


def start_slurmds(layout: Layout, names: Sequence[str]) -> None:
    """Start slurmd in the given nodes, unless it is running there."""
    started = [
        launch(
            layout, node, ["slurmd", "-D", "-f", str(layout.slurm_conf)], listens(layout, node, layout.first_port + 1)
        )
        for node in names
        if process_in_node(layout, node, "slurmd") is None
    ]
    for daemon in started:
        daemon.wait()


def running_daemons(layout: Layout, spec: ClusterSpec) -> dict[str, bool]:
    """Return whether each daemon that the cluster should have is running, by name."""
    programs = ["munged", "slurmctld"] + (["mariadbd", "slurmdbd"] if spec.has_database else [])
    running = {name: process_in_node(layout, CONTROLLER, name) is not None for name in programs}
    for node in spec.node_names:
        running[f"slurmd {node}"] = process_in_node(layout, node, "slurmd") is not None
    return running


def slurm_environment(layout: Layout) -> dict[str, str]:
    """Return a clean environment with this cluster's SLURM_CONF, and with the programs of its Slurm release on PATH."""
    programs = layout.read_spec().programs
    path = f"{programs}:{SEARCH_PATH}" if programs else SEARCH_PATH
    return clean_environment(SLURM_CONF=str(layout.slurm_conf), PATH=path)


def last_lines(log: Path, count: int = 5) -> str:
    """Return the last lines of a log as one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or "(nothing)"


def listens(layout: Layout, node: str, port: int) -> Callable[[], bool]:
    """Return a check whether a process in `node` listens on `port`. A connection would cause errors in Slurm's logs."""
    listening, local_port = "0A", f":{port:04X}"

    def check() -> bool:
        first = first_process(layout, node)
        if first is None:
            return False
        rows = Path(f"/proc/{first}/net/tcp").read_text().splitlines()[1:]
        return any(row.split()[1].endswith(local_port) and row.split()[3] == listening for row in rows)

    return check
