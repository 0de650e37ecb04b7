"""Start and stop a cluster, and operations on a running one."""

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.devcluster import accounting, daemons, network, nodes
from toolkit.devcluster.configuration import write_folder
from toolkit.devcluster.layout import CONTROLLER, MOST_GPUS, MOST_NODES, ClusterSpec, Layout
from toolkit.devcluster.packages import install_command, missing_programs
from toolkit.devcluster.processes import kill_and_wait, run_program, wait_until
from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError

READY_TIMEOUT_S = 30.0
# sinfo's states of a node that can run jobs.
SERVING_STATES = ("idle", "mixed", "allocated", "completing")


@dataclass(frozen=True)
class ClusterStatus:
    """The running parts. `nodes` maps a name to Slurm's state, `daemons` a name to whether it runs."""

    name: str
    folder: Path
    slurm_conf: Path
    nodes: Mapping[str, str]
    daemons: Mapping[str, bool]


def require_machine(*, accounting: bool = True) -> None:
    """Raise a ToolkitError on a machine without Linux, root rights, or a program; the fix installs programs."""
    if platform.system() != "Linux":
        raise ToolkitError(
            f"the dev cluster needs Linux namespaces, but this machine runs {platform.system()}",
            fix="run it in a Debian 12 virtual machine or a privileged container",
        )
    missing = missing_programs(accounting=accounting)
    if missing:
        raise ToolkitError(f"not installed: {', '.join(missing)}", fix=install_command())
    if os.geteuid() != 0:
        raise ToolkitError("the dev cluster needs root, to make namespaces and a bridge", fix="use sudo")


def up(layout: Layout, wanted: ClusterSpec) -> bool:
    """Start the cluster, or restart its failed parts; True if anything was started. Undoes a failed first start.

    Chooses `wanted.subnet` and `wanted.seat`. Raises ToolkitError if it is up with another spec, or a daemon failed.
    """
    require_machine(accounting=wanted.accounting)
    if wanted.accounting_of == layout.name:
        raise ToolkitError("a cluster cannot share its own accounting", fix="choose another cluster")
    if not 1 <= wanted.nodes <= MOST_NODES or not 0 <= wanted.gpus <= MOST_GPUS:
        raise ToolkitError(
            f"{wanted.nodes} nodes with {wanted.gpus} GPUs each are not supported",
            fix=f"use --nodes from 1 to {MOST_NODES}, --gpus from 0 to {MOST_GPUS}",
        )
    if wanted.link:
        network.bits_per_second(wanted.link)
    with _lock(layout):
        if layout.spec_file.exists():
            return _start_again(layout, wanted)
        _refuse_foreign_folder(layout)
        try:
            seat = accounting.find_seat(wanted.accounting_of) if wanted.accounting_of else ""
            spec = replace(wanted, subnet=network.free_subnet(layout), seat=seat)
            write_folder(layout, spec)
            _start_all(layout, spec)
        except BaseException:
            _stop_all(layout, wanted.node_names)
            _remove_folder(layout)
            raise
        return True


def _refuse_foreign_folder(layout: Layout) -> None:
    """Raise a ToolkitError for a folder with other files than logs that `down` left, since `down` removes it."""
    foreign = sorted(entry.name for entry in layout.folder.iterdir() if entry != layout.logs)
    if foreign:
        raise ToolkitError(
            f"the folder is not empty ({foreign[0]}), and not a dev cluster's",
            where=str(layout.folder),
            fix="choose a new folder with --folder",
        )


def _start_again(layout: Layout, wanted: ClusterSpec) -> bool:
    spec = layout.read_spec()
    if replace(wanted, subnet=spec.subnet, seat=spec.seat) != spec:
        raise ToolkitError(
            f"the cluster is up with {spec.nodes} nodes, {spec.gpus} GPUs, link {spec.link or 'none'}, "
            f"accounting {_accounting_of(spec)}, options {list(spec.options)}",
            where=str(layout.folder),
            fix="`toolkit devcluster down`, then `up`",
        )
    if all(daemons.running_daemons(layout, spec).values()):
        return False
    _start_all(layout, spec)
    return True


def _accounting_of(spec: ClusterSpec) -> str:
    return f"of {spec.accounting_of}" if spec.accounting_of else "on" if spec.accounting else "off"


def _start_all(layout: Layout, spec: ClusterSpec) -> None:
    """Start every part that does not run, in the order of their dependencies."""
    network.make_bridge(layout, spec)
    for node in (CONTROLLER, *spec.node_names):
        first = nodes.first_process(layout, node)
        if first is None or layout.link(node) not in network.links(layout):
            first = first or nodes.start_node(layout, node)
            network.connect_node(layout, spec, node, first)
            if spec.link and node != CONTROLLER:
                network.shape_link(layout, node, first, spec.link)
    if spec.accounting_of and layout.link_to_accounting() not in network.links(layout):
        network.connect_to_accounting(layout, spec, _require_node(layout, CONTROLLER))
    daemons.start_munged(layout)
    if spec.accounting:
        accounting.start_accounting(layout, spec)
    daemons.start_slurmctld(layout)
    daemons.start_slurmds(layout, spec.node_names)
    connected = network.links(layout)
    _wait_until_serving(layout, [node for node in spec.node_names if connected[layout.link(node)]])


def _wait_until_serving(layout: Layout, names: Sequence[str]) -> None:
    def serving() -> bool:
        states = node_states(layout)
        return all(states.get(name, "") in SERVING_STATES for name in names)

    if not wait_until(serving, READY_TIMEOUT_S, poll_s=0.1):
        states = node_states(layout)
        bad = {name: states.get(name) for name in names if states.get(name, "") not in SERVING_STATES}
        raise OwnFailureError(
            f"nodes are not ready after {READY_TIMEOUT_S:g} s: {bad}; slurmctld's last lines: "
            + daemons.last_lines(layout.logs / "slurmctld.log"),
            where=str(layout.logs),
        )


def down(layout: Layout, *, keep_logs: bool = False) -> None:
    """Kill every process of the cluster, and remove its links and folder; with `keep_logs` FOLDER/logs remains."""
    spec = layout.read_spec()
    with _lock(layout):
        _stop_all(layout, spec.node_names)
        _remove_folder(layout, keep_logs=keep_logs)


def _remove_folder(layout: Layout, *, keep_logs: bool = False) -> None:
    for path in layout.own_folders:
        if path.exists() and not (keep_logs and path == layout.logs):
            shutil.rmtree(path)
    layout.spec_file.unlink(missing_ok=True)
    if not any(layout.folder.iterdir()):
        layout.folder.rmdir()


def _stop_all(layout: Layout, names: Sequence[str]) -> None:
    # The controller first, otherwise it would see the nodes fail and requeue their jobs.
    nodes.stop_nodes(layout, [CONTROLLER])
    nodes.stop_nodes(layout, names)
    network.remove_links(layout)


def status(layout: Layout) -> ClusterStatus:
    """The running parts of the cluster; NotFoundError if it is not up."""
    spec = layout.read_spec()
    running = daemons.running_daemons(layout, spec)
    states = node_states(layout) if running["slurmctld"] else {}
    by_name = {name: states.get(name, "unknown") for name in spec.node_names}
    return ClusterStatus(layout.name, layout.folder, layout.slurm_conf, by_name, running)


def node_states(layout: Layout) -> dict[str, str]:
    """Node name to Slurm's state, with its flags ("down*" does not respond)."""
    env = daemons.slurm_environment(layout)
    text = run_program(["sinfo", "--noheader", "--Node", "--format=%N %T"], env=env)
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def fail(layout: Layout, node: str) -> None:
    """Disconnect a node; Slurm notices after SlurmdTimeout."""
    _require_node(layout, node)
    network.switch_link(layout, node, on=False)


def kill_slurmd(layout: Layout, node: str) -> None:
    """SIGKILL only a node's slurmd: its jobs keep running, but Slurm no longer sees them."""
    _require_node(layout, node)
    slurmd = nodes.process_in_node(layout, node, "slurmd")
    if slurmd is None:
        raise OwnFailureError(
            f"slurmd is not running in {node}", where=str(layout.folder), fix=f"toolkit devcluster restore {node}"
        )
    kill_and_wait([slurmd])


def restore(layout: Layout, node: str) -> None:
    """Connect a node again, start its slurmd if it is not running, and wait until it serves."""
    _require_node(layout, node)
    network.switch_link(layout, node, on=True)
    daemons.start_slurmds(layout, [node])
    env = daemons.slurm_environment(layout)
    if node_states(layout)[node].startswith(("down", "drain")):
        with suppress(OwnFailureError):  # it has just resumed by itself; the wait below checks it
            run_program(["scontrol", "update", f"nodename={node}", "state=resume"], env=env)
    _wait_until_serving(layout, [node])


def shape(layout: Layout, node: str, rate: str) -> None:
    """Set the speed of `node`'s cable, or of "all", to `rate`; "none" removes the limit."""
    if rate != "none":
        network.bits_per_second(rate)
    names = layout.read_spec().node_names if node == "all" else [node]
    for name in names:
        network.shape_link(layout, name, _require_node(layout, name), rate)


def command_in_node(layout: Layout, node: str, argv: Sequence[str]) -> list[str]:
    """The argv that runs `argv` inside `node`, in the current folder if the node has it, else in /.

    The environment is the caller's; add SLURM_CONF to it. Errors as in `_require_node`.
    """
    first = _require_node(layout, node)
    return nodes.enter_command(first, argv, directory=_directory_inside(first))


def _directory_inside(first: int) -> Path:
    """The current folder if the node has it too, else /."""
    here = Path.cwd()
    return here if Path(f"/proc/{first}/root{here}").is_dir() else Path("/")


def _require_node(layout: Layout, node: str) -> int:
    """PID of the node's first process; NotFoundError without such a node, OwnFailureError if it is not running."""
    names = [CONTROLLER, *layout.read_spec().node_names]
    if node not in names:
        raise NotFoundError(f"node {node!r} not found", where=str(layout.folder), fix=f"use one of {', '.join(names)}")
    first = nodes.first_process(layout, node)
    if first is None:
        raise OwnFailureError(f"{node} is not running", where=str(layout.folder), fix="toolkit devcluster up")
    return first


@contextmanager
def _lock(layout: Layout) -> Iterator[None]:
    """Allow one `up` or `down` at a time; the lock is on the folder itself, so that no lock file remains."""
    while True:
        layout.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(layout.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Another `down` may have removed the folder during the wait for its lock.
            if layout.folder.exists() and os.path.samestat(os.fstat(handle), layout.folder.stat()):
                yield
                return
        finally:
            os.close(handle)
