"""Start and stop a dev cluster, and change or query a running one."""

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.devcluster import accounting, daemons, network, nodes, releases
from toolkit.devcluster.configuration import write_folder
from toolkit.devcluster.layout import CONTROLLER, MOST_GPUS, MOST_NODES, ClusterSpec, Layout
from toolkit.devcluster.packages import install_command, missing_programs
from toolkit.devcluster.processes import kill_and_wait, run_program, wait_until
from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError

READY_TIMEOUT_S = 30.0
# The states in sinfo of nodes that can run jobs.
SERVING_STATES = ("idle", "mixed", "allocated", "completing")


@dataclass(frozen=True)
class ClusterStatus:
    """The state of a cluster. `nodes` maps node names to Slurm states; `daemons` maps names to whether they run."""

    name: str
    folder: Path
    slurm_conf: Path
    nodes: Mapping[str, str]
    daemons: Mapping[str, bool]


def require_machine(*, accounting: bool = True) -> None:
    """Raise a ToolkitError unless this host runs Linux, has the needed programs, and the user is root."""
    if platform.system() != "Linux":
        raise ToolkitError(
            f"the dev cluster needs Linux namespaces, but this host runs {platform.system()}",
            fix="run it in a Debian 12 virtual machine or a privileged container",
        )
    missing = missing_programs(accounting=accounting)
    if missing:
        raise ToolkitError(f"programs or libraries not installed: {', '.join(missing)}", fix=install_command())
    if os.geteuid() != 0:
        raise ToolkitError("the dev cluster needs root, to create namespaces and a network bridge", fix="use sudo")


def up(layout: Layout, wanted: ClusterSpec) -> bool:
    """Start the cluster, or restart its failed parts; return whether anything was started. Undo a failed first start.

    Chooses `subnet`, `seat` and `root`. Raises ToolkitError if the cluster is up with another spec, or a daemon failed.
    """
    require_machine(accounting=wanted.accounting)
    if wanted.accounting_of == layout.name:
        raise ToolkitError("a cluster cannot share accounting with itself", fix="choose another cluster")
    if not 1 <= wanted.nodes <= MOST_NODES or not 0 <= wanted.gpus <= MOST_GPUS:
        raise ToolkitError(
            f"{wanted.nodes} nodes with {wanted.gpus} GPUs each are not supported",
            fix=f"use --nodes 1 to {MOST_NODES}, and --gpus 0 to {MOST_GPUS}",
        )
    if wanted.link:
        network.bits_per_second(wanted.link)
    root = releases.install(wanted.slurm)
    with _lock(layout):
        if layout.spec_file.exists():
            return _start_again(layout, wanted)
        _refuse_foreign_folder(layout)
        try:
            seat = accounting.find_seat(wanted.accounting_of) if wanted.accounting_of else ""
            spec = replace(wanted, subnet=network.free_subnet(layout), seat=seat, root=root)
            write_folder(layout, spec)
            _start_all(layout, spec)
        except BaseException:
            _stop_all(layout, wanted.node_names)
            _remove_folder(layout)
            raise
        return True


def _refuse_foreign_folder(layout: Layout) -> None:
    """Raise a ToolkitError if the folder contains files other than logs, since `down` would remove the folder."""
    foreign = sorted(entry.name for entry in layout.folder.iterdir() if entry != layout.logs)
    if foreign:
        raise ToolkitError(
            f"expected an empty folder, found {foreign[0]!r}, which does not belong to a dev cluster",
            where=str(layout.folder),
            fix="choose a new folder with --folder",
        )


def _start_again(layout: Layout, wanted: ClusterSpec) -> bool:
    spec = layout.read_spec()
    if replace(wanted, subnet=spec.subnet, seat=spec.seat, root=spec.root) != spec:
        raise ToolkitError(
            f"the cluster is already up with other settings: {spec.nodes} nodes, {spec.gpus} GPUs, "
            f"link {spec.link or 'none'}, accounting {_accounting_of(spec)}, options {list(spec.options)}, "
            f"Slurm {spec.slurm or 'of this machine'}",
            where=str(layout.folder),
            fix="run `toolkit devcluster down`, then `up`",
        )
    if all(daemons.running_daemons(layout, spec).values()):
        return False
    _start_all(layout, spec)
    return True


def _accounting_of(spec: ClusterSpec) -> str:
    return f"of {spec.accounting_of}" if spec.accounting_of else "on" if spec.accounting else "off"


def _start_all(layout: Layout, spec: ClusterSpec) -> None:
    """Start every part that is not running, in the order of dependencies."""
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
        try:
            states = node_states(layout)
        except ToolkitError as error:  # slurmctld listens before it reads all of its configuration
            lines = daemons.last_lines(layout.logs / "slurmctld.log")
            raise OwnFailureError(
                f"slurmctld in controller does not respond: {error.message}; its last lines: {lines}",
                where=str(layout.logs),
            ) from None
        return all(states.get(name, "") in SERVING_STATES for name in names)

    if not wait_until(serving, READY_TIMEOUT_S, poll_s=0.1):
        states = node_states(layout)
        bad = {name: states.get(name) for name in names if states.get(name, "") not in SERVING_STATES}
        raise OwnFailureError(
            f"nodes are not ready after {READY_TIMEOUT_S:g} s: {bad}; last lines of slurmctld.log: "
            + daemons.last_lines(layout.logs / "slurmctld.log"),
            where=str(layout.logs),
        )


def down(layout: Layout, *, keep_logs: bool = False) -> None:
    """Kill every process of the cluster, and remove its links and folder. `keep_logs` keeps FOLDER/logs."""
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
    # Stop the controller first; otherwise it would notice that nodes fail, and requeue their jobs.
    nodes.stop_nodes(layout, [CONTROLLER])
    nodes.stop_nodes(layout, names)
    network.remove_links(layout)


def status(layout: Layout) -> ClusterStatus:
    """Return the state of the cluster and its daemons; raises NotFoundError if it is not up."""
    spec = layout.read_spec()
    running = daemons.running_daemons(layout, spec)
    states = node_states(layout) if running["slurmctld"] else {}
    by_name = {name: states.get(name, "unknown") for name in spec.node_names}
    return ClusterStatus(layout.name, layout.folder, layout.slurm_conf, by_name, running)


def node_states(layout: Layout) -> dict[str, str]:
    """Return the Slurm state of each node by name, with flags: `*` in "down*" means that the node does not respond."""
    env = daemons.slurm_environment(layout)
    text = run_program(["sinfo", "--noheader", "--Node", "--format=%N %T"], env=env)
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def fail(layout: Layout, node: str) -> None:
    """Disconnect a node; Slurm notices after SlurmdTimeout."""
    _require_node(layout, node)
    network.switch_link(layout, node, on=False)


def kill_slurmd(layout: Layout, node: str) -> None:
    """Send SIGKILL only to the slurmd of a node. Its jobs keep running, but Slurm can no longer reach them."""
    _require_node(layout, node)
    slurmd = nodes.process_in_node(layout, node, "slurmd")
    if slurmd is None:
        raise OwnFailureError(
            f"slurmd is not running in {node}", where=str(layout.folder), fix=f"`toolkit devcluster restore {node}`"
        )
    kill_and_wait([slurmd])


def restore(layout: Layout, node: str) -> None:
    """Reconnect a node, start its slurmd if it is not running, and wait until the node can run jobs."""
    _require_node(layout, node)
    network.switch_link(layout, node, on=True)
    daemons.start_slurmds(layout, [node])
    env = daemons.slurm_environment(layout)
    if node_states(layout)[node].startswith(("down", "drain")):
        with suppress(OwnFailureError):  # fails if the node has just resumed by itself, which the wait below verifies
            run_program(["scontrol", "update", f"nodename={node}", "state=resume"], env=env)
    _wait_until_serving(layout, [node])


def shape(layout: Layout, node: str, rate: str) -> None:
    """Limit the link of `node`, or of "all" nodes, to `rate`; "none" removes the limit."""
    if rate != "none":
        network.bits_per_second(rate)
    names = layout.read_spec().node_names if node == "all" else [node]
    for name in names:
        network.shape_link(layout, name, _require_node(layout, name), rate)


def command_in_node(layout: Layout, node: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` inside `node`, in the current folder if the node has it, else in /.

    The caller must add SLURM_CONF to the environment. Raises the errors of `_require_node`.
    """
    first = _require_node(layout, node)
    return nodes.enter_command(first, argv, directory=_directory_inside(first))


def _directory_inside(first: int) -> Path:
    """Return the current folder if the node has it too, else /."""
    here = Path.cwd()
    return here if Path(f"/proc/{first}/root{here}").is_dir() else Path("/")


def _require_node(layout: Layout, node: str) -> int:
    """Return the PID of the node's first process; NotFoundError if it is unknown, OwnFailureError if it is down."""
    names = [CONTROLLER, *layout.read_spec().node_names]
    if node not in names:
        raise NotFoundError(f"node {node!r} not found", where=str(layout.folder), fix=f"use one of {', '.join(names)}")
    first = nodes.first_process(layout, node)
    if first is None:
        raise OwnFailureError(f"{node} is not running", where=str(layout.folder), fix="`toolkit devcluster up`")
    return first


@contextmanager
def _lock(layout: Layout) -> Iterator[None]:
    """Allow one `up` or `down` at a time. The folder itself is locked, so that no lock file remains."""
    while True:
        layout.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(layout.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Another `down` may have removed the folder while this process waited to lock it.
            if layout.folder.exists() and os.path.samestat(os.fstat(handle), layout.folder.stat()):
                yield
                return
        finally:
            os.close(handle)
